"""The examples reach the accuracy that they claim."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from tests.ranks import FORKED, run_ranks, start_module

pytestmark = pytest.mark.slow("trains each example to the accuracy that it states")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def one_thread():
    """Use one thread: small layers gain nothing from two, and lose much on shared cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("pytorch_loop", "timm"),
        ("with_accelerate", "accelerate"),
        ("with_transformers", "transformers"),
    ],
)
def test_example_reaches_its_accuracy(name, needs, monkeypatch, tmp_path):
    pytest.importorskip(needs)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = EXAMPLES / f"{name}.py"
    assert "more than 95 % accuracy" in path.read_text()
    main = runpy.run_path(str(path))["main"]
    accuracy = main()
    assert accuracy > 0.95
    resumes = {"with_accelerate": "checkpoints/epoch-4", "with_transformers": "resume"}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"] * (name in resumes)
    if name in resumes:
        again = main(resumes[name])
        assert again > 0.95
        if name == "with_transformers":  # which has nothing left to train
            assert again == accuracy


@pytest.mark.usefixtures("one_thread")
def test_features_without_labels_beat_those_of_the_untrained_encoder():
    path = EXAMPLES / "barlow_twins.py"
    assert "more than 80 % of 359" in path.read_text()
    assert "fewer than 75 %" in path.read_text()
    untrained, trained = runpy.run_path(str(path))["main"]()
    assert untrained < 0.75
    assert trained > 0.8


def run_on_a_rank(path):
    return runpy.run_path(path)["main"]()


def test_the_sharded_example_reaches_its_accuracy_on_four_ranks():
    pytest.importorskip("timm")
    path = EXAMPLES / "with_fsdp2.py"
    assert "more than 95 % accuracy" in path.read_text()
    # Each rank has its own batch norm statistics, and so its own accuracy.
    assert min(run_ranks(4, run_on_a_rank, str(path))) > 0.95


#: How the examples with a plan are started on two ranks of a CPU, as their docstrings say.
TWO_RANKS = {
    "ddp_spawn": "python examples/ddp_spawn.py",
    "from_horovod": "torchrun --nproc-per-node 2 examples/from_horovod.py",
    "with_accelerate": "ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 "
    "examples/with_accelerate.py",
    "with_lightning": "python examples/with_lightning.py --devices 2",
}
MORE = {"ddp_spawn": ["file://{folder}/store"]}  # no port, which another test could have


@pytest.mark.parametrize("name", TWO_RANKS)
def test_example_with_a_plan_reaches_its_accuracy_on_two_ranks(name, tmp_path, monkeypatch):
    path = EXAMPLES / f"{name}.py"
    text, command = path.read_text(), TWO_RANKS[name]
    assert "more than 95 % accuracy" in text
    assert f"    {command}\n" in text
    environment = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(EXAMPLES.parent / "src")}
    out = tmp_path / "out"
    before, is_torchrun, _ = command.partition("torchrun")
    if is_torchrun:
        source, module = "GROUP_RANK", "torch.distributed.run"
        environment |= dict(word.split("=") for word in before.split())
        options = ["--standalone", "--nproc-per-node", "2", *FORKED, str(path)]
    else:
        source, module = "host names", str(path)
        further = [word.format(folder=tmp_path) for word in MORE.get(name, [])]
        options = [*shlex.split(command)[2:], *further]
    process = start_module(module, options, out, cwd=tmp_path, environment=environment)
    process.join(600)
    said = out.read_text()
    assert process.exitcode == 0, said[-3000:]
    # The hook has run: this is known of no state that has not been connected.
    assert f"nodes ((0, 1),) by {source}\n" in said
    found = re.search(r"accuracy\W+([\d.]+)(%?)", said)
    assert float(found[1]) / (100 if found[2] else 1) > 0.95
    if name == "with_lightning":  # on one device, on which nothing is left to train
        monkeypatch.chdir(tmp_path)
        (saved,) = Path("checkpoints").iterdir()
        assert runpy.run_path(str(path))["main"](str(saved)) > 0.95
