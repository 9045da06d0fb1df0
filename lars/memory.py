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


def as_rows(kinds: Sequence[Sequence[Tensor]]) -> list[Tensor | None]:
    """Return matrices with one tensor in each row, elements in the same order in all matrices.

    Args:
        kinds: lists of ``k`` tensors of one shape, ``n`` elements each, or empty lists.

    Returns:
        For each list a contiguous matrix, shape ``[k, n]``, or None where it is empty. If ``k`` is
        1 and the tensors of all kinds are packed alike, the matrices share their memory.
    """
    firsts = [tensors[0] for tensors in kinds if tensors]
    if len(kinds[0]) == 1 and _packed_alike(firsts):
        size = firsts[0].numel()
        return [t[0].as_strided((1, size), (size, 1)) if t else None for t in kinds]
    shape = (len(kinds[0]), firsts[0].numel())
    return [torch.stack(list(t)).contiguous().view(shape) if t else None for t in kinds]


def copy_rows(matrix: Tensor, tensors: list[Tensor]) -> None:
    """Copy the rows of a matrix made by :func:`as_rows` back, unless they share memory."""
    if matrix.data_ptr() != tensors[0].data_ptr():
        rows = matrix.view(len(tensors), *tensors[0].shape).unbind()
        torch._foreach_copy_(tensors, list(rows))


def _packed_alike(tensors: Sequence[Tensor]) -> bool:
    if all(t.is_contiguous() for t in tensors):
        return True
    order = _order(tensors[0])
    return is_packed(tensors[0]) and all(_order(t) == order for t in tensors)


def _order(tensor: Tensor) -> list[int]:
    # The stride of a dimension of size 1 is arbitrary.
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
