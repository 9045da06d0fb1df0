"""LARS over lists of tensors with torch's multi-tensor ("foreach") operators, on any device.

Implements :mod:`~largebatch.lars.reference` in a constant number of passes over all tensors,
without a host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .coefficients import coefficients
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
    """Take one step in place; see :func:`largebatch.lars.reference.update`.

    Args:
        sum_over_shards: for tensors that are this rank's shards of larger ones, a function that
            sums a tensor over the ranks that hold the other shards. Trust ratios are then those
            of the whole tensors.
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
    c = coefficients(dialect, norms[0], norms[1], hyper)

    step = list(torch._foreach_add(g, w, alpha=hyper.weight_decay))
    torch._foreach_mul_(step, list(c.rate.unbind()))
    if buffers:
        v = _workspace(buffers, dtype, found_inf)
        torch._foreach_mul_(v, c.carry.to(dtype) if isinstance(c.carry, Tensor) else c.carry)
        torch._foreach_add_(v, step)
        if hyper.nesterov:
            torch._foreach_add_(step, v, alpha=hyper.momentum)
        else:
            step = v
        _store(buffers, v, found_inf)
    w = _workspace(weights, dtype, found_inf)
    if isinstance(c.lr, Tensor):
        torch._foreach_sub_(w, torch._foreach_mul(step, c.lr.to(dtype)))
    else:
        torch._foreach_sub_(w, step, alpha=c.lr)
    _store(weights, w, found_inf)
    if halves:
        _store(halves, w, found_inf)
    return c.ratios


def _as(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype) for t in tensors]


def _workspace(
    targets: Sequence[Tensor], dtype: torch.dtype, found_inf: Tensor | None
) -> list[Tensor]:
    """Tensors in ``dtype`` to update in place: ``targets`` themselves when no copy is needed."""
    work = _as(targets, dtype)
    if found_inf is not None and targets[0].dtype == dtype:
        return [t.clone() for t in work]
    return work


def _store(targets: Sequence[Tensor], work: Sequence[Tensor], found_inf: Tensor | None) -> None:
    """Round ``work`` into ``targets``, which stay bit for bit where ``found_inf`` is not zero."""
    if work[0] is targets[0]:
        return
    if found_inf is not None:
        pairs = zip(targets, work, strict=True)
        work = [torch.where(found_inf > 0, old, new.to(old.dtype)) for old, new in pairs]
    torch._foreach_copy_(list(targets), list(work))
