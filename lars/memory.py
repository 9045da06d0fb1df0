"""Tensors in the memory layout, dtype and device that a kernel needs.

Kernels that walk through memory element by element need the weight, gradient and buffer of a
parameter to store their elements in the same order, whatever the order is (contiguous,
channels-last, transposed).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_packed(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, in any order, without gaps or overlaps."""
    if tensor.is_contiguous():
        return True
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return True
    return _order(torch.empty_like(tensor)) == _order(tensor)


def packed(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is packed, else a contiguous copy."""
    return tensor if is_packed(tensor) else tensor.contiguous()


def laid_out_as(model: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in ``dtype`` and the memory order of a packed one, copied if need be."""
    if tensor.dtype == dtype and (
        (tensor.is_contiguous() and model.is_contiguous())
        or tensor.stride() == model.stride()  # nearly always so, and fast
        or _order(tensor) == _order(model)
    ):
        return tensor
    return torch.empty_like(model, dtype=dtype).copy_(tensor)


def flat_in_place(tensors: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """Return 1-D views of tensors of one shape if all are packed in the same order, else None."""
    present = [t for t in tensors if t is not None]
    for t in present:
        if not t.is_contiguous():
            break
    else:
        return [t if t is None else t.view(-1) for t in tensors]
    order = _order(present[0])
    if not is_packed(present[0]) or any(_order(t) != order for t in present):
        return None
    return [t if t is None else t.as_strided((t.numel(),), (1,)) for t in tensors]


def _order(tensor: Tensor) -> list[int]:
    # The stride of a dimension of size 1 is arbitrary.
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``; the host waits for the copy only if that is the CPU."""
    # A copy to the CPU that does not wait may be read before it has arrived.
    return tensor.to(device, non_blocking=device.type != "cpu")


def as_dtype(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors in ``dtype``; those that have it already are not copied."""
    return [t.to(dtype) for t in tensors]


def workspace(
    targets: Sequence[Tensor], dtype: torch.dtype, found_inf: Tensor | None
) -> list[Tensor]:
    """Return tensors in ``dtype`` to update in place: ``targets`` when no copy is needed."""
    work = as_dtype(targets, dtype)
    if found_inf is not None and targets[0].dtype == dtype:
        return [t.clone() for t in work]
    return work


def store(targets: Sequence[Tensor], work: Sequence[Tensor], found_inf: Tensor | None) -> None:
    """Round ``work`` into ``targets``, which stay bit for bit where ``found_inf`` is not zero."""
    if work[0] is targets[0]:
        return
    if found_inf is not None:
        pairs, overflowed = zip(targets, work, strict=True), found_inf > 0
        work = [torch.where(overflowed, old, new.to(old.dtype)) for old, new in pairs]
    torch._foreach_copy_(list(targets), list(work))
