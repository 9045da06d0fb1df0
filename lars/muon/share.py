"""Orthogonalisation shared by ranks that have the same gradients, as under DDP.

Each rank orthogonalises some of the tensors and broadcasts their directions to the others. The
tensors are given out in the order of their cost, the most expensive first, each to the rank with
the least work so far (Graham 1969). The assignment depends on shapes alone, so all ranks make the
same one.

One broadcast per owner carries no padding, whatever the sizes; on gloo it also takes less time than
an all-gather of equal parts (benchmarks/results/muon_sharing.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import capture
from .step import like, orthogonalized, wide_matrices

#: Number, rows and columns of the matrices of a tensor, with rows <= columns.
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """Which rank orthogonalises which tensors, and where they are in the buffer that is sent."""

    owners: tuple[int, ...]  # the rank of each tensor
    offsets: tuple[int, ...]  # the first element of each tensor in the buffer
    bounds: tuple[int, ...]  # the first element of each rank's part, and the end of the last


@lru_cache(maxsize=256)
def plan_of(shapes: tuple[Shape, ...], ranks: int) -> Plan:
    """Give each tensor, the most expensive first, to the rank with the least work."""
    costs = [k * m * m * (n + 2 * m) for k, m, n in shapes]  # in proportion to FLOPs
    loads, owners = [0] * ranks, [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda i: (-costs[i], shapes[i])):
        owner = owners[index] = loads.index(min(loads))
        loads[owner] += costs[index]
    offsets, bounds = [0] * len(shapes), [0]
    for rank in range(ranks):
        end = bounds[-1]
        for index in (i for i, owner in enumerate(owners) if owner == rank):
            offsets[index] = end
            end += math.prod(shapes[index])
        bounds.append(end)
    return Plan(tuple(owners), tuple(offsets), tuple(bounds))


class Sharing:
    """The part of one rank of a process group in the orthogonalisation."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                f"process_group has no rank {dist.get_rank()}; valid: a group with this rank, or "
                "None"
            )
        self._digests: dict[Hashable, Tensor] = {}

    def agree(self, gradients: Hashable, device: torch.device) -> None:
        """Raise unless the descriptions of all ranks' gradients are equal; only new ones wait."""
        new = gradients not in self._digests
        if new:
            capture.refuse(device, "has not compared these gradients with those of other ranks")
            # A number of 56 bits, which fits one element of an all-gather.
            digest = int.from_bytes(sha256(repr(gradients).encode()).digest()[:7], "big")
            self._digests[gradients] = torch.tensor([digest], device=device)
        mine = self._digests[gradients]
        digests = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(digests, mine, group=self.group)
        found = torch.cat(digests)
        if not new:  # compared on the device: RuntimeError comes with the next wait for it
            torch._assert_async(
                (found == mine).all(),
                "process_group: its ranks have gradients of different parameters, shapes or memory "
                "layouts; valid: the same on all ranks, as DistributedDataParallel makes them",
            )
            return
        digest_of = found.tolist()
        others = [rank for rank, digest in enumerate(digest_of) if digest != digest_of[self.rank]]
        if others:
            del self._digests[gradients]
            raise ValueError(
                f"process_group: its ranks {', '.join(map(str, others))} have gradients of "
                f"other parameters, shapes or memory layouts than its rank {self.rank}; valid: "
                "the same on all ranks, as DistributedDataParallel makes them"
            )

    def directions_of(
        self,
        moves: list[Tensor],
        conv_mode: str,
        orthogonalize: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Orthogonalise moves as ``step.directions_of`` does; results are sent in ``dtype``."""
        shapes = tuple(_shape(move.shape, conv_mode) for move in moves)
        plan = plan_of(shapes, self.ranks)
        buffer = moves[0].new_empty(plan.bounds[-1], dtype=dtype)
        parts = [
            buffer[start : start + k * m * n].view(k, m, n)
            for start, (k, m, n) in zip(plan.offsets, shapes, strict=True)
        ]
        own = [index for index, owner in enumerate(plan.owners) if owner == self.rank]
        results = orthogonalized([wide_matrices(moves[i], conv_mode) for i in own], orthogonalize)
        for index, result in zip(own, results, strict=True):
            parts[index].copy_(result)
        works = [
            dist.broadcast(buffer[start:end], group=self.group, group_src=rank, async_op=True)
            for rank, (start, end) in enumerate(pairwise(plan.bounds))
            if start < end
        ]
        for work in works:
            if work is not None:  # None: this rank is not in the group
                work.wait()
        return [like(part, move, conv_mode) for part, move in zip(parts, moves, strict=True)]


def _shape(shape: torch.Size, conv_mode: str) -> Shape:
    if conv_mode == "flatten":
        sides = shape[0], math.prod(shape[1:])
        return 1, min(sides), max(sides)
    return math.prod(shape[2:]), min(shape[:2]), max(shape[:2])
