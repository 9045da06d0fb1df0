"""LARS over lists of tensors with torch's multi-tensor ("foreach") operators, on any device.

Implements :mod:`~largebatch.lars.reference` in a constant number of passes over all tensors,
without a host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .coefficients import Divisor, coefficients, divisor
from .memory import as_dtype, store, workspace
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
    """Take one step in place; ``sum_over_shards`` sums squared norms where tensors are shards."""
    dtype = compute_dtype(weights[0])
    w = as_dtype(weights, dtype)
    g = as_dtype(gradients, dtype)
    if inverse_scale is not None:
        g = list(torch._foreach_mul(g, inverse_scale.to(dtype)))
    if hyper.maximize:
        g = list(torch._foreach_neg(g))
    step = list(torch._foreach_add(g, w, alpha=hyper.weight_decay))
    divides = divisor(dialect, hyper)
    carry: float | Tensor = hyper.momentum
    if divides is not Divisor.MOVE:
        divisors = g if divides is Divisor.GRADIENT else step
        norms = _norms(w, divisors, hyper, sum_over_shards)
        c = coefficients(dialect, norms[0], norms[1], hyper)
        carry = c.carry
        torch._foreach_mul_(step, list(c.rate.unbind()))
    if buffers:
        v = workspace(buffers, dtype, found_inf)
        torch._foreach_mul_(v, carry.to(dtype) if isinstance(carry, Tensor) else carry)
        torch._foreach_add_(v, step)
        if hyper.nesterov:
            torch._foreach_add_(step, v, alpha=hyper.momentum)
        else:
            step = v
        store(buffers, v, found_inf)
    if divides is Divisor.MOVE:
        norms = _norms(w, step, hyper, sum_over_shards)
        c = coefficients(dialect, norms[0], norms[1], hyper)
    w = workspace(weights, dtype, found_inf)
    if isinstance(c.lr, Tensor):
        lr = c.lr.to(dtype)
        torch._foreach_sub_(w, torch._foreach_mul(step, list(lr.unbind()) if lr.dim() else lr))
    else:
        torch._foreach_sub_(w, step, alpha=c.lr)
    store(weights, w, found_inf)
    if halves:
        store(halves, w, found_inf)
    return c.ratios


def _norms(
    w: list[Tensor],
    divisors: list[Tensor],
    hyper: Hyper,
    sum_over_shards: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Return the norms of weights and divisors, shape ``[2, len(w)]``; ones if nothing adapts."""
    if not hyper.adapt:
        return w[0].new_ones(2, len(w))
    norms = torch.stack([*torch._foreach_norm(w), *torch._foreach_norm(divisors)]).view(2, -1)
    if sum_over_shards is not None:
        norms = sum_over_shards(norms.square()).sqrt()
    return norms
