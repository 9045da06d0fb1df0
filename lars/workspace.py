"""Compute in one dtype on tensors of another, and store the result unless a step overflowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
