"""Memory layout of tensors, for kernels that walk through memory element by element.

Such kernels need the weight, gradient and buffer of a parameter to store their elements in the
same order, whatever the order is (contiguous, channels-last, transposed).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_packed(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, in any order, without gaps or overlaps."""
    return tensor.is_contiguous() or _order(torch.empty_like(tensor)) == _order(tensor)


def same_order(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of one shape are packed, with their elements in the same order."""
    if all(t.is_contiguous() for t in tensors):
        return True
    order = _order(tensors[0])
    return is_packed(tensors[0]) and all(_order(t) == order for t in tensors)


def packed(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is packed, else a contiguous copy."""
    return tensor if is_packed(tensor) else tensor.contiguous()


def laid_out_as(model: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` in ``dtype`` with its elements in the memory order of ``model``.

    Args:
        model: a packed tensor of the same shape.
        tensor: any tensor.
        dtype: dtype of the result.

    Returns:
        The tensor itself when no copy is needed.
    """
    if tensor.dtype == dtype:
        if tensor.is_contiguous() and model.is_contiguous():
            return tensor
        if _order(tensor) == _order(model):
            return tensor
    return torch.empty_like(model, dtype=dtype).copy_(tensor)


def flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return 1-D views of packed tensors, with the elements in memory order."""
    return [t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,)) for t in tensors]


def _order(tensor: Tensor) -> list[int]:
    # The stride of a dimension of size 1 is arbitrary.
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
