"""The processes that a command starts are bound to the processors of their GPUs, if they can be."""

import pytest
from torch.distributed import run
from torch.numa import binding

from largebatch.recipes.commands.launch import torchrun


@pytest.fixture
def started(monkeypatch):
    """The words that torchrun is given, in place of starting processes."""
    words = []
    monkeypatch.setattr(run, "main", words.extend)
    monkeypatch.setattr(binding, "_get_logical_cpus_to_bind_to", lambda **_: {0, 1})
    monkeypatch.setattr(binding.shutil, "which", lambda program: f"/usr/bin/{program}")
    return words


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
