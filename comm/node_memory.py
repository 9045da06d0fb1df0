"""Memory that the ranks of a node share, for the phases of an all-reduce inside the node on gloo.

gloo sends between two processes of one machine over TCP, which copies every byte into the kernel
and out again. Here each rank writes to memory that the others read. Only signals still go through
gloo: an all-reduce of one number says that all ranks have reached a point. A rank that has died, or
is late, is therefore noticed as in any other collective.

The memory has no name (``memfd_create``, Linux): it is freed by the kernel when the last of the
ranks has ended, even by SIGKILL. Ranks open it by the process and descriptor of the first rank of
the node, in ``/proc``; ranks that cannot are not on one machine (or in containers with processes of
their own, or of different users), and use messages.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import DONE, Pending

#: Number of messages that may be in flight at a time: one more than the phases of an algorithm.
IN_FLIGHT = 4

#: Largest message that goes through the memory in one piece, which bounds its size.
LARGEST_BYTES = 8 * 2**20

_SPACE_BYTES = 2**40  # address range of the file; only pages that are written take memory
_NAME = "largebatch"


class NodeMemory:
    """The shared memory of one node, whose ranks take and leave its windows in one order."""

    def __init__(self, file: int, filled: ProcessGroup | None, summed: ProcessGroup | None) -> None:
        self._file, self._groups = file, (filled, summed)  # first: __del__ closes the file
        self.rank, self.size = 0, 1
        if filled is not None:
            self.rank, self.size = dist.get_rank(filled), dist.get_world_size(filled)
        self._windows: dict[int, list[Window]] = defaultdict(list)
        self._taken: dict[int, int] = defaultdict(int)
        self._end = 0

    def __del__(self) -> None:
        os.close(self._file)  # the mappings of windows stay valid without it

    def window(self, size_bytes: int) -> Window:
        """Return the next window for messages of ``size_bytes``, free on this rank."""
        # Sizes are rounded up to powers of two, so that few different windows exist.
        capacity = max(mmap.ALLOCATIONGRANULARITY, 1 << (size_bytes - 1).bit_length())
        turn, windows = self._taken[capacity] % IN_FLIGHT, self._windows[capacity]
        self._taken[capacity] += 1
        if turn == len(windows):
            length = (self.size + 1) * capacity
            memory = mmap.mmap(self._file, length, offset=self._end)
            self._end += length
            windows.append(Window(memory, capacity))
        return windows[turn]

    def all_filled(self) -> Pending:
        """Signal that this rank has written its part, and wait for the same of all others."""
        return self._all(self._groups[0])

    def all_summed(self) -> Pending:
        """Signal that this rank's share of the result is complete, and wait for all others."""
        return self._all(self._groups[1])

    @staticmethod
    def _all(group: ProcessGroup | None) -> Pending:
        if group is None:
            return DONE
        work: Any = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
        return work  # type: ignore[no-any-return]


class Window:
    """A part of the shared memory for one message at a time."""

    # A rank writes its part as soon as its own use of the window for the last message has ended: no
    # other rank reads that part any more, since all have completed their sums. Others may still
    # read the last result, so a rank writes to the result only after all have filled their parts.

    def __init__(self, memory: mmap.mmap, capacity: int) -> None:
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._capacity = capacity

    def part(self, rank: int, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the part that a rank of the node writes, as ``elements`` of ``dtype``."""
        start = (rank + 1) * self._capacity
        return self._bytes[start : start + elements * dtype.itemsize].view(dtype)

    def result(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the sum over the node, of which each rank writes its share."""
        return self._bytes[: elements * dtype.itemsize].view(dtype)


def connect(filled: ProcessGroup | None, summed: ProcessGroup | None) -> NodeMemory | None:
    """Share memory among the ranks of each node; None on all ranks if any node cannot."""
    # What crosses between nodes must be cut in the same way on every node. Signals of two kinds
    # take two groups of the same ranks, because their order differs from rank to rank.
    file = _new_file() if filled is None else _share_file(filled)
    able = torch.tensor([file is not None], dtype=torch.int32)
    dist.all_reduce(able, dist.ReduceOp.MIN)
    if file is None:
        return None
    if not able:
        os.close(file)
        return None
    return NodeMemory(file, filled, summed)


def _share_file(group: ProcessGroup) -> int | None:
    """Make a file in memory and open it on all ranks of a group; None if a rank cannot."""
    file = _new_file() if dist.get_rank(group) == 0 else None
    told: list[Any] = [None]
    if file is not None:
        token = secrets.token_bytes(16)
        os.pwrite(file, token, 0)
        told = [(os.getpid(), file, token)]
    dist.broadcast_object_list(told, group=group, group_src=0)
    return file if file is not None or told[0] is None else _opened(*told[0])


def _opened(process: int, number: int, token: bytes) -> int | None:
    """Open a file of another process; None if that is not on this machine, or of another user."""
    path = f"/proc/{process}/fd/{number}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    if os.pread(file, len(token), 0) == token:
        return file
    os.close(file)
    return None


def _new_file() -> int | None:
    """Make a file without a name in memory; None if the system has none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        file = os.memfd_create(_NAME)
    except OSError:
        return None
    try:
        os.ftruncate(file, _SPACE_BYTES)
    except OSError:  # beyond the limit on the size of files
        os.close(file)
        return None
    return file
