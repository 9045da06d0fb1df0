"""Memory, and a GPU's utilisation and power, with stand-ins for the GPU."""

import mmap
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.watch.memory import gpu_of
from largebatch.recipes.training.watch.meters import NAMES, Usage, metrics_of
from tests.ranks import run_ranks
from tests.recipes.runs import make

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_on_a_cpu_it_is_the_largest_resident_size_of_the_process():
    usage = Usage(CPU)
    before, *gpu = usage.read()
    assert gpu == [-1, -1]
    size = 1 << 28
    with mmap.mmap(-1, size) as pages:
        for place in range(0, size, mmap.PAGESIZE):
            pages[place] = 1
        there = usage.read()[0]
    assert there >= before
    assert size < there < 2**40
    assert usage.read()[0] == pytest.approx(there, rel=0.1)  # it does not shrink again
    assert metrics_of(usage.read()).keys() == {"memory_bytes"}
    assert gpu_of(CPU) is None


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for torch.cuda's counters and sensors; records what is asked of which device."""
    asked = []

    def sensor(name, value):
        def read(device):
            asked.append((name, device))
            if isinstance(value, Exception):
                raise value
            return value

        monkeypatch.setattr(torch.cuda, name, read)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    sensor("max_memory_allocated", 3 << 30)
    sensor("reset_peak_memory_stats", None)
    sensor("utilization", 97)
    sensor("power_draw", 650_500)  # milliwatts
    return SimpleNamespace(asked=asked, sensor=sensor)


def test_on_a_gpu_it_is_the_peak_since_the_last_reading(gpu):
    found = metrics_of(Usage(GPU).read())
    assert found == {"memory_bytes": 3 << 30, "gpu_utilisation": 97, "gpu_power_watts": 650.5}
    assert [name for name, _ in gpu.asked[:2]] == [
        "max_memory_allocated",
        "reset_peak_memory_stats",
    ]
    assert {device for _, device in gpu.asked} == {GPU}


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("nvidia-ml-py does not seem to be installed"), RuntimeError("no")]
)
def test_without_the_library_training_goes_on_and_does_not_ask_again(gpu, error):
    gpu.sensor("utilization", error)  # such as on a part of a GPU (MIG), which has its power
    usage = Usage(GPU)
    for _ in range(3):
        assert metrics_of(usage.read()) == {"memory_bytes": 3 << 30, "gpu_power_watts": 650.5}
    assert [name for name, _ in gpu.asked].count("utilization") == 1


def run_with_fake_usage(root, run_dir):
    trainer = make(root, run_dir, "stop_after=2", "evaluate_every=null")
    rank = dist.get_rank()
    trainer._readings._usage.read = lambda: [1000.0 + rank, 55.0 - rank, -1.0]
    trainer.run()


@pytest.mark.slow("trains on two ranks")
def test_of_several_ranks_the_largest_value_counts(photos, tmp_path):
    run_ranks(2, run_with_fake_usage, photos, tmp_path)
    (line,) = read_metrics(tmp_path)
    assert [line.get(name) for name in NAMES] == [1001.0, 55.0, None]
