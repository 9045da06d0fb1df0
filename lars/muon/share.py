"""Orthogonalisation shared by ranks that have the same gradients, as under DDP.

Each rank orthogonalises some of the tensors and broadcasts their directions to the others. To
assign them is to schedule jobs on equal machines: the longest first, each to the machine that would
end it first (Graham 1969). A job is a part of the tensors of one shape, which are orthogonalised in
one batch; the number of parts is the best by the cost of batches. The assignment depends on shapes
alone, and so all ranks make the same.

One broadcast per owner carries no padding, whatever the sizes; on gloo it also takes less time than
an all-gather of equal parts (benchmarks/results/muon_sharing.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import capture
from .cost import matrices_of, newton_schulz_flops
from .step import like, orthogonalized, wide_matrices

#: FLOPs in the time that a batch of matrices takes beside its products: about that of fifteen
#: launches of a kernel on a GPU, or of an operator on a CPU. An estimate, which no result needs.
_OVERHEAD = {"cpu": 3e6, "cuda": 2e10}

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Traffic:
    """What the ranks send in one step for one batch of tensors, of one dtype and group.

    Attributes:
        ranks: number of ranks.
        broadcasts: number of messages, each from one rank to all others.
        total_bytes: bytes of all broadcasts together. A rank receives all but its own.
    """

    ranks: int
    broadcasts: int
    total_bytes: int


@dataclass(frozen=True)
class Plan:
    """Which rank orthogonalises which tensors, and where they are in the buffer that travels.

    Attributes:
        owners: the rank of each tensor.
        offsets: the first element of each tensor in the buffer.
        bounds: the first element of each rank's part, and the end of the last.
    """

    owners: tuple[int, ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]


@lru_cache(maxsize=256)
def plan_of(shapes: tuple[Shape, ...], ranks: int, overhead: float) -> Plan:
    """Assign tensors to ranks such that the busiest rank has little to do.

    Args:
        shapes: ``(k, m, n)`` of the matrices of each tensor, with m <= n.
        ranks: number of ranks.
        overhead: FLOPs that a batch of matrices of equal shape costs beside its own.
    """
    most = max(Counter(shapes).values(), default=1)
    candidates = [_owners(shapes, ranks, overhead, pieces) for pieces in range(1, most + 1)]
    _, owners = min(candidates, key=lambda candidate: candidate[0])
    offsets, end, bounds = [0] * len(shapes), 0, [0]
    for rank in range(ranks):
        for index in [i for i, owner in enumerate(owners) if owner == rank]:
            offsets[index] = end
            end += math.prod(shapes[index])
        bounds.append(end)
    return Plan(tuple(owners), tuple(offsets), tuple(bounds))


def _owners(
    shapes: tuple[Shape, ...], ranks: int, overhead: float, pieces: int
) -> tuple[float, list[int]]:
    """Assign the tensors of each shape in up to ``pieces`` parts.

    Returns:
        The FLOPs of the busiest rank, and the rank of each tensor.
    """
    by_shape: dict[Shape, list[int]] = {}
    for index, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(index)
    jobs = [
        indices[start::pieces]
        for indices in by_shape.values()
        for start in range(min(pieces, len(indices)))
    ]
    costs = [len(indices) * _flops(shapes[indices[0]]) for indices in jobs]
    owners = [0] * len(shapes)
    loads = [0.0] * ranks
    batches: list[set[tuple[int, int]]] = [set() for _ in range(ranks)]
    for job in sorted(range(len(jobs)), key=lambda job: -costs[job]):
        sides = shapes[jobs[job][0]][1:]
        ends = [
            load + costs[job] + (0.0 if sides in of_rank else overhead)
            for load, of_rank in zip(loads, batches, strict=True)
        ]
        owner = ends.index(min(ends))
        loads[owner] = ends[owner]
        batches[owner].add(sides)
        for index in jobs[job]:
            owners[index] = owner
    return max(loads), owners


def traffic(
    shapes: Sequence[torch.Size],
    ranks: int,
    *,
    conv_mode: str = "flatten",
    itemsize: int = 2,
    device_type: str = "cuda",
) -> Traffic:
    """Return what ranks send in a step for tensors of one group, device and dtype.

    Args:
        shapes: of the tensors, ``[out, in, ...]``.
        ranks: number of ranks.
        conv_mode: as in :class:`~largebatch.lars.Muon`.
        itemsize: bytes of an element in the dtype of Newton-Schulz: 2 on CUDA, 4 on a CPU.
        device_type: of the tensors.
    """
    matrices = tuple(_shape(shape, conv_mode) for shape in shapes)
    if ranks == 1:
        return Traffic(1, 0, 0)
    bounds = plan_of(matrices, ranks, _overhead(device_type)).bounds
    parts = [end - start for start, end in pairwise(bounds)]
    return Traffic(ranks, sum(part > 0 for part in parts), sum(parts) * itemsize)


class Sharing:
    """The part of one rank in the orthogonalisation.

    Args:
        group: the process group of the ranks.

    Raises:
        ValueError: this rank is not in the group.
    """

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
        """Compare the gradients of this step with those of the other ranks.

        The host reads the comparison, and waits for the device, only where this rank has not seen
        such gradients before. Elsewhere the device asserts it, so that ranks that differ fail
        before they send anything.

        Args:
            gradients: what must be equal on all ranks, the same type on all.
            device: where the comparison is made.

        Raises:
            ValueError: ranks differ, and this one has not seen such gradients before.
            RuntimeError: ranks differ, and it has; on CUDA, at a later wait for the device. Or the
                gradients are new in the capture of a CUDA graph.
        """
        new = gradients not in self._digests
        if new:
            capture.refuse(device, "has not compared these gradients with those of other ranks")
            digest = int.from_bytes(sha256(repr(gradients).encode()).digest()[:7], "big")
            self._digests[gradients] = torch.tensor([digest], device=device)
        mine = self._digests[gradients]
        digests = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(digests, mine, group=self.group)
        found = torch.cat(digests)
        if not new:
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
        """Orthogonalise moves; see :func:`largebatch.lars.muon.step.directions_of`.

        Args:
            dtype: of what ``orthogonalize`` returns, in which directions travel. No rounding is
                added to what one rank alone would do.
        """
        shapes = tuple(_shape(move.shape, conv_mode) for move in moves)
        plan = plan_of(shapes, self.ranks, _overhead(moves[0].device.type))
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
            if work is not None:  # it is where this rank is not in the group
                work.wait()
        return [like(part, move, conv_mode) for part, move in zip(parts, moves, strict=True)]


def _flops(shape: Shape) -> float:
    k, m, n = shape
    return newton_schulz_flops(m, n, matrices=k)


def _shape(shape: torch.Size, conv_mode: str) -> Shape:
    matrices, rows, columns = matrices_of(shape, conv_mode)
    return matrices, min(rows, columns), max(rows, columns)


def _overhead(device_type: str) -> float:
    return _OVERHEAD.get(device_type, _OVERHEAD["cuda"])
