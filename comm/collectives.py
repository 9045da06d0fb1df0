"""The collectives that the algorithms are made of, under one name for all versions of torch.

torch 2.14 renamed ``*_tensor`` collectives to ``*_single``; the old names may go.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(tensor: Tensor, group: ProcessGroup) -> None:
    """Sum ``tensor`` over ``group`` in place, on every rank."""
    dist.all_reduce(tensor, group=group)


def reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Sum ``tensor`` over ``group`` and return this rank's share, ``tensor.numel() / size`` long.

    On gloo the share is gathered by an all-to-all and summed here, in FP32 for half precision:
    gloo's own reduce-scatter sends as much as a whole all-reduce, twice what is needed.

    Args:
        tensor: 1-d, its length a multiple of the group's size.
    """
    size = dist.get_world_size(group)
    if dist.get_backend(group) != "gloo":
        share = tensor.new_empty(tensor.numel() // size)
        _reduce_scatter(share, tensor, group=group)
        return share
    shares = torch.empty_like(tensor)
    dist.all_to_all_single(shares, tensor, group=group)
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    total = shares.view(size, -1).sum(0, dtype=torch.float32 if half else None)
    return total.to(tensor.dtype)


def all_gather(share: Tensor, output: Tensor, group: ProcessGroup) -> None:
    """Write every rank's ``share`` (1-d) into ``output`` (1-d), in rank order."""
    _all_gather(output, share, group=group)
