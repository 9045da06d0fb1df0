"""The phases of an all-reduce whose ranks share memory inside each node: sum, cross, copy.

Each rank sums a share of the message over its node, all-reduces that share across nodes in place,
and copies the whole result. The leader algorithm has one share, of the first rank; the hierarchical
one has equal shares. Conversion to a wire dtype costs nothing of its own: gradients are rounded as
they are written to the memory, and widened as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import collectives
from ..collectives import DONE, Pending
from ..node_memory import NodeMemory

_BLOCK_ELEMENTS = 2**15  # summed at a time, so that the partial sum stays in the cache


def phases(
    tensor: Tensor,
    dtype: torch.dtype,
    memory: NodeMemory,
    shares: Sequence[int],
    across: ProcessGroup | None,
) -> Iterator[Pending]:
    """Sum ``tensor`` (1-d, CPU) over all ranks in place, in three phases, sending ``dtype``."""
    ends = [sum(shares[: rank + 1]) for rank in range(memory.size)]
    own = slice(ends[memory.rank] - shares[memory.rank], ends[memory.rank])
    elements = tensor.numel()
    window = memory.window(elements * dtype.itemsize)
    parts = [window.part(rank, elements, dtype) for rank in range(memory.size)]
    result = window.result(elements, dtype)
    for others in (slice(0, own.start), slice(own.stop, elements)):
        parts[memory.rank][others].copy_(tensor[others])
    yield memory.all_filled()
    share = result[own]
    _sum(tensor[own], [p[own] for r, p in enumerate(parts) if r != memory.rank], share)
    yield collectives.all_reduce(share, across) if share.numel() else DONE
    yield memory.all_summed()
    tensor.copy_(result)


def _sum(own: Tensor, parts: Sequence[Tensor], out: Tensor) -> None:
    """Write ``own + sum(parts)`` to ``out``, of the parts' dtype, block by block."""
    if out.dtype not in (torch.float16, torch.bfloat16):
        for start in range(0, out.numel(), _BLOCK_ELEMENTS):
            block = slice(start, min(start + _BLOCK_ELEMENTS, out.numel()))
            out[block].copy_(own[block])
            for part in parts:
                out[block].add_(part[block])
        return
    total = torch.empty(min(_BLOCK_ELEMENTS, out.numel()), dtype=torch.float32)
    addend, rounded = torch.empty_like(total), torch.empty_like(total, dtype=out.dtype)
    for start in range(0, out.numel(), _BLOCK_ELEMENTS):
        block = slice(start, min(start + _BLOCK_ELEMENTS, out.numel()))
        size = block.stop - block.start
        # This rank's own values are rounded as those of the others were.
        total[:size].copy_(rounded[:size].copy_(own[block]))
        for part in parts:  # a copy converts much faster than an addition of two dtypes
            total[:size].add_(addend[:size].copy_(part[block]))
        out[block].copy_(total[:size])
