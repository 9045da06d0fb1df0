"""Asynchronous collectives from which the algorithms are built.

torch 2.14 renamed ``*_tensor`` to ``*_single``. gloo's collectives are replaced where they send
more than necessary (torch 2.15, bytes for n bytes on p ranks counted on 4): its all-reduce,
all-gather and broadcast send the optimum, but its reduce-scatter as much as a whole all-reduce,
2(p - 1) n, and its reduce 1.5 (p - 1) n. An all-to-all followed by a local sum, and point-to-point
messages to the root, which sums, take their place.

The replacements sum half precision in FP32 and round once; gloo's ring rounds at each of its p - 1
additions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: Bytes that a summing root receives from each rank at a time: bounds memory and fits into cache.
_PIECE_BYTES = 2**20


class Pending(Protocol):
    """An operation in flight, such as a torch ``Work``."""

    def wait(self) -> Any:
        """Block until done (gloo), or order it before later work on the current stream (NCCL)."""


class _Done:
    def wait(self) -> None:
        """Return at once."""


#: An operation that is already complete.
DONE: Pending = _Done()


class _WaitAll:
    """Waits for all of ``works``, then calls ``finish``."""

    def __init__(self, works: Sequence[Pending], finish: Callable[[], object] | None = None):
        self._works, self._finish = works, finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._finish:
            self._finish()


def all_reduce(tensor: Tensor, group: ProcessGroup | None) -> Pending:
    """Sum ``tensor`` over ``group`` in place, on every rank."""
    return _start(dist.all_reduce, group, tensor)


def reduce_scatter(tensor: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Pending]:
    """Sum ``tensor`` into this rank's share, a view of it that is returned; overwrite the rest."""
    if group is not None and dist.get_backend(group) == "gloo":
        return reduce_scatter_in_fp32(tensor, group)
    share = _share(tensor, group)
    return share, _start(_reduce_scatter, group, share, tensor)


def reduce_scatter_in_fp32(
    tensor: Tensor, group: ProcessGroup | None, *, mean: bool = False
) -> tuple[Tensor, Pending]:
    """Do the same by an all-to-all and a local sum, in FP32 for half precision, rounded once."""
    if group is None:
        return tensor, DONE
    share, size = _share(tensor, group), dist.get_world_size(group)
    shares = torch.empty_like(tensor)
    sent = _start(dist.all_to_all_single, group, shares, tensor)

    def add() -> None:
        table = shares.view(size, -1)
        if _is_half(tensor):
            total = table.sum(0, dtype=torch.float32)
            share.copy_(total.div_(size) if mean else total)
            return
        torch.sum(table, 0, out=share)
        if mean:
            share.div_(size)

    return share, _WaitAll([sent], add)


def all_gather(tensor: Tensor, group: ProcessGroup | None) -> Pending:
    """Gather each rank's share of ``tensor`` (1-d) into ``tensor`` on all ranks, in rank order."""
    share = _share(tensor, group)
    return _start(_all_gather, group, tensor, share)


def reduce(tensor: Tensor, group: ProcessGroup | None) -> Pending:
    """Sum ``tensor`` over ``group`` in place on its first rank; other ranks lose its content."""
    if group is None or dist.get_backend(group) != "gloo":
        return _start(dist.reduce, group, tensor, group_dst=0)
    return send_and_sum(tensor, group)


def broadcast(tensor: Tensor, group: ProcessGroup | None) -> Pending:
    """Copy ``tensor`` from the first rank of ``group`` to all others."""
    return _start(dist.broadcast, group, tensor, group_src=0)


def send_and_sum(tensor: Tensor, group: ProcessGroup) -> Pending:
    """Sum as :func:`reduce` does, with point-to-point messages from every rank to the first."""
    if dist.get_rank(group) == 0:
        return _RootSum(tensor, group)
    pieces = tensor.split(_piece_elements(tensor))
    return _WaitAll([exchange([(0, p)], [], group, tag=i) for i, p in enumerate(pieces)])


def exchange(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    group: ProcessGroup,
    *,
    tag: int = 0,
) -> Pending:
    """Send to and receive from ranks, by their number in ``group``; gloo keeps the order by tag."""
    operations = [dist.P2POp(dist.isend, t, None, group, tag, r) for r, t in sends if t.numel()]
    operations += [dist.P2POp(dist.irecv, t, None, group, tag, r) for r, t in receives if t.numel()]
    return _WaitAll(dist.batch_isend_irecv(operations)) if operations else DONE


class _RootSum:
    """The sum on the first rank, piece by piece: one is received while the previous is added."""

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        self._pieces = tensor.split(_piece_elements(tensor))
        self._others = range(1, dist.get_world_size(group))
        self._group = group
        self._arriving = [self._receive(i) for i in range(min(2, len(self._pieces)))]

    def _receive(self, index: int) -> tuple[Tensor, Pending]:
        piece = self._pieces[index]
        parts = piece.new_empty(len(self._others), piece.numel())
        receives = list(zip(self._others, parts, strict=True))
        return parts, exchange([], receives, self._group, tag=index)

    def wait(self) -> None:
        for index, piece in enumerate(self._pieces):
            parts, pending = self._arriving.pop(0)
            pending.wait()
            if _is_half(piece):
                piece.copy_(parts.sum(0, dtype=torch.float32).add_(piece))
            else:
                for part in parts:
                    piece.add_(part)
            if index + 2 < len(self._pieces):
                self._arriving.append(self._receive(index + 2))


def _start(collective: Any, group: ProcessGroup | None, *args: Any, **options: Any) -> Pending:
    """Start one of torch's collectives; a group of one rank, None, has nothing to do."""
    if group is None:
        return DONE
    work: Pending = collective(*args, group=group, async_op=True, **options)
    return work


def _share(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    if group is None:
        return tensor
    length = tensor.numel() // dist.get_world_size(group)
    start = length * dist.get_rank(group)
    return tensor[start : start + length]


def _piece_elements(tensor: Tensor) -> int:
    return max(1, _PIECE_BYTES // tensor.element_size())


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)
