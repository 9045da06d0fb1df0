"""Shared memory that cannot be set up leaves no descriptor, and no other file is taken for it."""

import os
from unittest import mock

import pytest
import torch.distributed as dist

from largebatch.comm import node_memory


@pytest.fixture
def shared():
    file = node_memory._new_file()
    os.pwrite(file, b"a token", 0)
    yield file
    os.close(file)


def test_only_the_file_that_was_made_for_it_is_opened(shared, tmp_path):
    """The rank may be on another machine, where the process is another one, or none."""
    opened = node_memory._opened(os.getpid(), shared, b"a token")
    assert os.path.sameopenfile(shared, opened)
    os.close(opened)
    before = len(os.listdir("/proc/self/fd"))
    with open(tmp_path / "other", "wb+") as other:
        other.write(b"a token")
        other.flush()
        assert node_memory._opened(os.getpid(), other.fileno(), b"a token") is None
    assert node_memory._opened(os.getpid(), shared, b"another") is None
    assert node_memory._opened(2**22 + 1, shared, b"a token") is None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_a_rank_cannot_open_is_closed_by_all(rank):
    said = []

    def all_reduce(able, *_, **__):
        said.append(able.item())
        able.zero_()  # as the other rank could not open it

    def broadcast(told, **_):
        told[0] = told[0] or (2**22 + 1, 3, b"a token")

    before = os.listdir("/proc/self/fd")
    fake = {"broadcast_object_list": broadcast, "all_reduce": all_reduce}
    with mock.patch.multiple(dist, get_rank=lambda _: rank, **fake):
        assert node_memory.connect(mock.sentinel.filled, mock.sentinel.summed) is None
    assert said == [rank == 0]
    assert len(os.listdir("/proc/self/fd")) == len(before)
