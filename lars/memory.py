"""For kernels that walk through memory: tensors whose elements lie in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_packed(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps or overlaps, in whatever order."""
    return tensor.is_contiguous() or _order(torch.empty_like(tensor)) == _order(tensor)


def packed(tensor: Tensor) -> Tensor:
    """The tensor itself if it is packed, else a copy that is."""
    return tensor if is_packed(tensor) else tensor.contiguous()


def laid_out_as(model: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in ``dtype``, its elements in the order of the packed ``model``.

    It is the tensor itself where nothing stands against it, else a copy.
    """
    if tensor.dtype == dtype:
        if tensor.is_contiguous() and model.is_contiguous():
            return tensor
        if _order(tensor) == _order(model):
            return tensor
    return torch.empty_like(model, dtype=dtype).copy_(tensor)


def flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Packed tensors as vectors, in the order of memory."""
    return [t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,)) for t in tensors]


def _order(tensor: Tensor) -> list[int]:
    # Dimensions of size 1 may have any stride.
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
