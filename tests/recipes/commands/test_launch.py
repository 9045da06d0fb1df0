"""The processes that a command starts are bound to the processors of their GPUs, if they can be."""

from collections import Counter

import pytest
from torch.distributed import run
from torch.numa import binding
from typer.testing import CliRunner

from largebatch.recipes.commands.launch import torchrun
from largebatch.recipes.commands.tree import app


@pytest.fixture
def started(monkeypatch):
    """The words that torchrun is given, in place of starting processes."""
    words = []
    monkeypatch.setattr(run, "main", words.extend)
    monkeypatch.setattr(binding, "_get_logical_cpus_to_bind_to", lambda **_: {0, 1})
    monkeypatch.setattr(binding.shutil, "which", lambda program: f"/usr/bin/{program}")
    return words


#: Each command that starts itself again: its words, its options, and its module.
AGAIN = [
    (
        ["tune", "lr"],
        ["digits", "device=cpu", "--lr", "0.5..2", "--runs", "8.0"],
        "tune_lr",
    ),
    (["comm", "tune"], ["--out", "a.json", "--wire", "fp16", "--wire", "bf16"], "tune_comm"),
]


@pytest.mark.parametrize(("words", "options", "module"), AGAIN)
def test_a_command_is_started_again_with_its_options(started, monkeypatch, words, options, module):
    monkeypatch.setattr("largebatch.recipes.train.check", lambda *_: None)
    for _ in range(2):
        result = CliRunner().invoke(app, [*words, *options, "--nproc", "2"])
        assert result.exit_code == 0, result.output
        place = started.index("-m")
        again = started[place + 2 :]
        assert started[place + 1] == f"largebatch.recipes.{module}"
        assert "--nproc" not in again
        assert not (Counter(options) - Counter(again)), again
        options = again  # which give the same once more
        started.clear()
    assert CliRunner().invoke(app, [*words, *options, "--nproc", "2"]).exit_code == 0
    assert started[started.index("-m") + 2 :] == options


def bound(words):
    return run.parse_args(words).numa_binding


def test_ranks_with_gpus_are_bound(started):
    torchrun(2, "largebatch.recipes.train", ["digits"])
    assert (bound(started), run.parse_args(started).nproc_per_node) == ("node", "2")


def test_ranks_without_gpus_are_not_bound(started):
    torchrun(2, "largebatch.recipes.train", ["digits", "device=cpu"])
    assert bound(started) is None


@pytest.mark.parametrize("lacks", ["numactl", "GPU", "cores", "function"])
def test_ranks_are_not_bound_where_torchrun_would_fail(started, monkeypatch, lacks):
    def gpu(device_index, numa_options):
        if device_index == 1:
            raise RuntimeError("No accelerator available for NUMA binding")
        return {0}

    if lacks == "numactl":
        monkeypatch.setattr(binding.shutil, "which", lambda program: None)
    elif lacks == "function":
        monkeypatch.delattr(binding, "_get_validated_logical_cpus_to_bind_to")
    else:
        found = gpu if lacks == "GPU" else lambda **_: set()
        monkeypatch.setattr(binding, "_get_logical_cpus_to_bind_to", found)
    torchrun(2, "largebatch.recipes.train", ["digits"])
    assert bound(started) is None
