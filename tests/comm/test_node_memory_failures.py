"""Shared memory that cannot be set up: no rank waits for others, and no descriptor is left."""

import os
import socket
from unittest import mock

import pytest
import torch.distributed as dist

from largebatch.comm import node_memory
from largebatch.comm.node_memory import NodeMemory


def is_open(file):
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def test_memory_that_fails_at_once_closes_its_file():
    file = os.memfd_create("test")
    with (
        mock.patch.object(dist, "get_rank", side_effect=ValueError("no such group")),
        pytest.raises(ValueError, match="no such group") as raised,
    ):
        NodeMemory(file, mock.sentinel.group, mock.sentinel.group)
    raised.value.__traceback__ = None  # which holds the object
    del raised
    assert not is_open(file)


@pytest.fixture
def sockets():
    mine, other = socket.socketpair()
    mine.settimeout(0.01)
    with mine, other:
        yield mine, other


def test_a_file_is_received(sockets):
    mine, other = sockets
    file = os.memfd_create("test")
    socket.send_fds(other, [b"m"], [file])
    received = node_memory._received(mine)
    assert received is not None
    assert os.path.sameopenfile(file, received)
    os.close(file)
    os.close(received)


def test_no_file_is_received_from_a_rank_that_has_closed_its_end_or_is_silent(sockets):
    mine, other = sockets
    assert node_memory._received(mine) is None
    other.close()
    assert node_memory._received(mine) is None


def share_alone(rank):
    """Set up memory on a node of two ranks, of which the other does not take part further."""

    def broadcast(address, **_):
        address[0] = address[0] or b"\0an address"

    said = []
    with (
        mock.patch.multiple(
            dist,
            get_rank=lambda _: rank,
            get_world_size=lambda _: 2,
            broadcast_object_list=broadcast,
            all_reduce=lambda tensor, *_, **__: said.append(tensor.item()),
        ),
        mock.patch.object(node_memory, "_reaches", return_value=True),
        mock.patch.object(node_memory, "_CONNECT_SECONDS", 0.01),
    ):
        assert node_memory.connect(mock.sentinel.filled, mock.sentinel.summed) is None
    return said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_misses_the_file_says_so_to_all_nodes(rank):
    before = os.listdir("/proc/self/fd")
    assert share_alone(rank) == [1, 0]  # able in the node, then not able in the job
    assert len(os.listdir("/proc/self/fd")) == len(before)
