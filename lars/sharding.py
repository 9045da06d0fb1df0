"""Parameters that are sharded over ranks (DTensor: FSDP2's ``fully_shard``, tensor parallelism).

Each rank updates its own shard. The trust ratio needs the norm of the whole tensor, so squared
norms are summed over the ranks that hold its shards: one small all-reduce per sharded mesh
dimension for all tensors of a parameter group that share device, dtype and layout. What needs whole
matrices gathers each tensor, and keeps this rank's shard of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

#: Device mesh and placements of a DTensor; None for a plain tensor.
Layout = tuple[Any, tuple[Any, ...]] | None

_PLAIN = (Tensor, Parameter)


def layout_of(tensor: Tensor) -> Layout:
    """Return how ``tensor`` is distributed over ranks."""
    if type(tensor) in _PLAIN or not _is_dtensor(tensor):
        return None
    return tensor.device_mesh, tuple(tensor.placements)  # type: ignore[attr-defined]


def local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's part of each tensor; writing to it writes to the tensor."""
    return [t.to_local() if _is_dtensor(t) else t for t in tensors]  # type: ignore[attr-defined]


def sum_over(layout: Layout) -> Callable[[Tensor], Tensor]:
    """Return a function that sums a tensor, in place, over the ranks that hold the shards."""
    assert layout is not None
    mesh, placements = layout
    groups = [mesh.get_group(i) for i, place in enumerate(placements) if not place.is_replicate()]

    def total(values: Tensor) -> Tensor:
        for group in groups:
            dist.all_reduce(values, group=group)
        return values

    return total


def on_whole_tensors(
    function: Callable[[list[Tensor]], list[Tensor]], layout: Layout, shapes: Sequence[torch.Size]
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return a function of this rank's shards for one of whole tensors, which it gathers."""
    if layout is None:
        return function
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = layout
    everywhere = [Replicate()] * mesh.ndim

    def whole(shard: Tensor, shape: torch.Size) -> Tensor:
        stride = torch.empty(shape, device="meta").stride()
        tensor = DTensor.from_local(
            shard.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return tensor.full_tensor()

    def of_shards(shards: list[Tensor]) -> list[Tensor]:
        results = function([whole(*pair) for pair in zip(shards, shapes, strict=True)])
        tensors = [DTensor.from_local(t, mesh, everywhere, run_check=False) for t in results]
        return [t.redistribute(placements=placements).to_local() for t in tensors]

    return of_shards


def is_flattened_by_fsdp1(parameter: Tensor) -> bool:
    """Whether FSDP1 has put a parameter into a flat one, or it is that one."""
    return bool(
        getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False)
    )


def _is_dtensor(tensor: Tensor) -> bool:
    if type(tensor) in _PLAIN or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
