"""The collectives that the algorithms are made of, each started at once and waited for later.

One name for all versions of torch (2.14 renamed ``*_tensor`` collectives to ``*_single``; the old
names may go), and the better form where a back end's own sends more than it must. What gloo does
by itself (torch 2.15, counted on 4 ranks, of n bytes):

- its all-reduce is a ring in segments, its all-gather a ring, its broadcast a binomial tree: they
  send 2(p - 1) n, (p - 1) n and (p - 1) n in all, the least there is;
- its reduce-scatter sends as much as a whole all-reduce, 2(p - 1) n, twice what is needed: an
  all-to-all and a local sum are used instead;
- its reduce sends 1.5 (p - 1) n: the root takes what each sends, and sums, instead.

Where these sums are made here, half precision is summed in FP32 and rounded once. gloo's ring
rounds to the data's dtype at each of its p - 1 additions.
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

#: What a root that sums takes from each rank at a time: bounds its memory, and fits into cache.
_PIECE_BYTES = 2**20


class Pending(Protocol):
    """Something started, such as a torch ``Work``."""

    def wait(self) -> Any:
        """Return when it is done (gloo), or order it before what this stream does next (NCCL)."""


class _Done:
    def wait(self) -> None:
        """There is nothing to wait for."""


#: What is done already.
DONE: Pending = _Done()


class _All:
    """All of ``works``, and then ``finish``."""

    def __init__(self, works: Sequence[Pending], finish: Callable[[], object] | None = None):
        self._works, self._finish = works, finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._finish:
            self._finish()


def all_reduce(tensor: Tensor, group: ProcessGroup | None) -> Pending:
    """Sum ``tensor`` over ``group`` in place, on every rank."""
    if group is None:
        return DONE
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    return work  # type: ignore[no-any-return]


def reduce_scatter(tensor: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Pending]:
    """Sum ``tensor`` over ``group`` into this rank's share of it, a view.

    Args:
        tensor: 1-d, its length a multiple of the group's size; outside of the share its content
            is lost.

    Returns:
        The share, ``tensor.numel() / size`` long, and what to wait for before it holds the sum.
    """
    if group is None:
        return tensor, DONE
    share = _share(tensor, group)
    if dist.get_backend(group) != "gloo":
        work: Any = _reduce_scatter(share, tensor, group=group, async_op=True)
        return share, work
    shares = torch.empty_like(tensor)
    sent: Any = dist.all_to_all_single(shares, tensor, group=group, async_op=True)

    def add() -> None:
        table = shares.view(dist.get_world_size(group), -1)
        if _is_half(tensor):
            share.copy_(table.sum(0, dtype=torch.float32))
        else:
            torch.sum(table, 0, out=share)

    return share, _All([sent], add)


def all_gather(tensor: Tensor, group: ProcessGroup | None) -> Pending:
    """Fill ``tensor`` (1-d) with every rank's share of it, in rank order."""
    if group is None:
        return DONE
    work: Any = _all_gather(tensor, _share(tensor, group), group=group, async_op=True)
    return work  # type: ignore[no-any-return]


def reduce(tensor: Tensor, group: ProcessGroup | None) -> Pending:
    """Sum ``tensor`` over ``group`` in place on its first rank; elsewhere its content is lost."""
    if group is None:
        return DONE
    if dist.get_backend(group) != "gloo":
        work: Any = dist.reduce(tensor, group=group, group_dst=0, async_op=True)
        return work  # type: ignore[no-any-return]
    return send_and_sum(tensor, group)


def broadcast(tensor: Tensor, group: ProcessGroup | None) -> Pending:
    """Copy ``tensor`` from the first rank of ``group`` to all others."""
    if group is None:
        return DONE
    work: Any = dist.broadcast(tensor, group=group, group_src=0, async_op=True)
    return work  # type: ignore[no-any-return]


def send_and_sum(tensor: Tensor, group: ProcessGroup) -> Pending:
    """:func:`reduce`, by point-to-point messages from every rank to the first."""
    if dist.get_rank(group) == 0:
        return _Sum(tensor, group)
    pieces = tensor.split(_piece_elements(tensor))
    return _All([exchange([(0, p)], [], group, tag=i) for i, p in enumerate(pieces)])


def exchange(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    group: ProcessGroup,
    *,
    tag: int = 0,
) -> Pending:
    """Send to and receive from ranks of ``group``, all at the same time.

    Args:
        sends: (rank in the group, what it gets).
        receives: (rank in the group, where what it sends is put).
        tag: on gloo, messages between two ranks are matched in order among those of one tag.
    """
    operations = [dist.P2POp(dist.isend, t, None, group, tag, r) for r, t in sends if t.numel()]
    operations += [dist.P2POp(dist.irecv, t, None, group, tag, r) for r, t in receives if t.numel()]
    return _All(dist.batch_isend_irecv(operations)) if operations else DONE


class _Sum:
    """The sum on the first rank, piece by piece: one is on its way while the last is added."""

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


def _share(tensor: Tensor, group: ProcessGroup) -> Tensor:
    length = tensor.numel() // dist.get_world_size(group)
    start = length * dist.get_rank(group)
    return tensor[start : start + length]


def _piece_elements(tensor: Tensor) -> int:
    return max(1, _PIECE_BYTES // tensor.element_size())


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)
