"""The processes that a command starts: with its options, and bound to the cores of their GPUs."""

from collections import Counter

import pytest
from torch.distributed import run
from torch.numa import binding
from typer.testing import CliRunner

from largebatch.recipes.commands.launch import torchrun
from largebatch.recipes.commands.tree import app


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The words that torchrun is given, in place of starting processes."""
    words = []
    monkeypatch.setattr(run, "main", words.extend)
    monkeypatch.setattr(binding, "_get_logical_cpus_to_bind_to", lambda **_: {0, 1})
    monkeypatch.setattr(binding.shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr("largebatch.recipes.train.check", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return words


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("tune lr digits device=cpu", "--lr 0.5..2 --runs 8.0"),
        ("comm tune", "--out a.json --wire fp16 --wire bf16"),
        (
            "critical-batch digits data.path=PHOTOS batch_size=8 micro_batch_size=4",
            "--epochs 4.0 --rule sqrt --out mine",
        ),
    ],
)
def test_a_command_is_started_again_with_its_options(started, photos, words, options):
    words = words.replace("PHOTOS", str(photos))
    again = [*words.split(), *options.split()]
    for _ in range(2):  # what it is given gives the same once more
        result = CliRunner().invoke(app, [*again, "--nproc", "2"], prog_name="largebatch")
        assert result.exit_code == 0, result.output
        before, place = Counter(again), started.index("-m")
        module, *again = started[place + 1 :]
        assert module == "largebatch.recipes"
        assert again[: len(words.split())] == words.split()
        assert "--nproc" not in again
        assert before <= Counter(again)
        started.clear()
    assert before == Counter(again)


def test_ranks_are_bound_to_the_cores_of_their_gpus_where_torchrun_can(started, monkeypatch):
    def bound(*words):
        started.clear()
        torchrun(2, "largebatch.recipes.train", ["digits", *words])
        options = run.parse_args(started)
        assert options.nproc_per_node == "2"
        return options.numa_binding

    def no_second_gpu(device_index, numa_options):
        if device_index == 1:
            raise RuntimeError("No accelerator available for NUMA binding")
        return {0}

    assert bound() == "node"
    assert bound("device=cpu") is None
    for cores in (no_second_gpu, lambda **_: set()):
        with monkeypatch.context() as patch:
            patch.setattr(binding, "_get_logical_cpus_to_bind_to", cores)
            assert bound() is None
    monkeypatch.setattr(binding.shutil, "which", lambda program: None)  # without numactl
    assert bound() is None
    monkeypatch.delattr(binding, "_get_validated_logical_cpus_to_bind_to")
    assert bound() is None
