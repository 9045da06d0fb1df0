"""LARS over lists of tensors with torch's multi-tensor ("foreach") operators, on any device.

Computes what :mod:`~largebatch.lars.reference` defines, in a constant number of passes over all
tensors. Nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .coefficients import form
from .reference import Hyper, compute_dtype


def update(
    dialect: str,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    hyper: Hyper,
    inverse_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    halves: Sequence[Tensor] = (),
    *,
    sum_over_shards: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """As :func:`largebatch.lars.reference.update`.

    Args:
        sum_over_shards: where the tensors are this rank's shards of larger ones, sums a tensor
            over the ranks that hold the others, so that norms are those of the whole.
    """
    dtype = compute_dtype(weights[0])
    w = _as(weights, dtype)
    g = _as(gradients, dtype)
    if inverse_scale is not None:
        g = list(torch._foreach_mul(g, inverse_scale.to(dtype)))
    if hyper.adapt:
        norms = torch.stack([*torch._foreach_norm(w), *torch._foreach_norm(g)]).view(2, -1)
        if sum_over_shards is not None:
            norms = sum_over_shards(norms.square()).sqrt()
    else:
        norms = w[0].new_ones(2, len(w))
    f = form(dialect, norms[0], norms[1], hyper)

    step = list(torch._foreach_add(g, w, alpha=hyper.weight_decay))
    torch._foreach_mul_(step, list(f.rate.unbind()))
    if buffers:
        v = _work(buffers, dtype, found_inf)
        torch._foreach_mul_(v, f.carry.to(dtype) if isinstance(f.carry, Tensor) else f.carry)
        torch._foreach_add_(v, step)
        if hyper.nesterov:
            torch._foreach_add_(step, v, alpha=hyper.momentum)
        else:
            step = v
        _store(buffers, v, found_inf)
    w = _work(weights, dtype, found_inf)
    if isinstance(f.lr, Tensor):
        torch._foreach_sub_(w, torch._foreach_mul(step, f.lr.to(dtype)))
    else:
        torch._foreach_sub_(w, step, alpha=f.lr)
    _store(weights, w, found_inf)
    if halves:
        _store(halves, w, found_inf)
    return f.ratios


def _as(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype) for t in tensors]


def _work(kept: Sequence[Tensor], dtype: torch.dtype, skip: Tensor | None) -> list[Tensor]:
    """Tensors to compute the new value of ``kept`` in: itself where nothing stands against it."""
    work = _as(kept, dtype)
    if skip is not None and kept[0].dtype == dtype:
        return [t.clone() for t in work]
    return work


def _store(kept: Sequence[Tensor], work: Sequence[Tensor], skip: Tensor | None) -> None:
    """Round ``work`` into ``kept``; where ``skip`` is not zero, ``kept`` stays bit for bit."""
    if work[0] is kept[0]:
        return
    if skip is not None:
        work = [torch.where(skip > 0, k, t.to(k.dtype)) for k, t in zip(kept, work, strict=True)]
    torch._foreach_copy_(list(kept), list(work))
