"""LARS on the CPU with torch's fused SGD kernel, which reads and writes each element once.

The step is bound by memory bandwidth on a CPU, and multi-tensor operators stream every tensor
through memory once per operator. SGD's kernel computes ``v = m v + (1 - dampening) (g + l w)``,
``w = w - lr v`` in one pass; with the dampening ``1 - rate`` that is a step of LARS. Norms are
computed by BLAS's dot product, which is twice as fast as torch's norm and more accurate in FP32.
Tensors are updated one by one, so that the values read for the norms are still in the cache.

Implements :mod:`~largebatch.lars.reference` with rates as Python floats: reading a scalar is free
on a CPU, while an operator on it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .coefficients import Divisor, coefficients, divisor
from .memory import flat, laid_out_as, packed
from .reference import Hyper, compute_dtype

# The kernel takes the rate as 1 - dampening, which loses precision in FP64 below this rate.
_LEAST_RATE = 2.0**-16


def update(
    dialect: str,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    hyper: Hyper,
    inverse_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    halves: Sequence[Tensor] = (),
) -> Tensor:
    """Take one step on CPU tensors in place; see :func:`largebatch.lars.reference.update`."""
    dtype = compute_dtype(weights[0])
    ratios = torch.ones(len(weights), dtype=dtype)
    if found_inf is not None and found_inf.item() > 0:
        return ratios
    hyper = replace(hyper, lr=float(hyper.lr), previous_lr=float(hyper.previous_lr))
    w = [packed(t.to(dtype)) for t in weights]
    g = [laid_out_as(like, t, dtype) for like, t in zip(w, gradients, strict=True)]
    v = [laid_out_as(like, t, dtype) for like, t in zip(w, buffers, strict=False)]
    factor = 1.0 if inverse_scale is None else inverse_scale.to(dtype).item()
    factor = -factor if hyper.maximize else factor
    if factor != 1:
        g = list(torch._foreach_mul(g, factor))
    if hyper.adapt:
        for i in range(len(w)):
            one = slice(i, i + 1)
            ratios[i] = _adapted(dialect, w[one], g[one], v[one], hyper)
    else:
        c = coefficients(dialect, ratios[:1].double(), ratios[:1].double(), hyper)
        _apply(w, g, v, c.rate.item(), float(c.carry), float(c.lr), hyper)
    for targets, results in ((weights, w), (buffers, v), (halves, w)):
        for target, result in zip(targets, results, strict=False):
            if target is not result:
                target.copy_(result)
    return ratios


def _adapted(
    dialect: str, w: list[Tensor], g: list[Tensor], v: list[Tensor], hyper: Hyper
) -> float:
    """Update one tensor in place and return its trust ratio."""
    divides = divisor(dialect, hyper)
    step = g if divides is Divisor.GRADIENT else _decayed(w, g, hyper)
    if divides is Divisor.MOVE and v:
        torch._foreach_mul_(v, hyper.momentum)
        torch._foreach_add_(v, step)
        step = list(torch._foreach_add(step, v, alpha=hyper.momentum)) if hyper.nesterov else v
    norms = torch.stack([t.dot(t).sqrt() for t in flat(w + step)]).double()
    c = coefficients(dialect, norms[:1], norms[1:], hyper)
    if divides is Divisor.MOVE:
        torch._foreach_sub_(w, step, alpha=c.lr.item())
    else:
        _apply(w, g, v, c.rate.item(), float(c.carry), float(c.lr), hyper)
    return c.ratios.item()


def _decayed(w: list[Tensor], g: list[Tensor], hyper: Hyper) -> list[Tensor]:
    return list(torch._foreach_add(g, w, alpha=hyper.weight_decay))


def _apply(
    w: list[Tensor],
    g: list[Tensor],
    v: list[Tensor],
    rate: float,
    carry: float,
    lr: float,
    hyper: Hyper,
) -> None:
    """Update tensors that share a rate in place, by the formula of ``coefficients.py``."""
    if v and (hyper.nesterov or carry == 0 or 0 < rate < _LEAST_RATE):
        step = _decayed(w, g, hyper)
        torch._foreach_mul_(step, rate)
        torch._foreach_mul_(v, carry)
        torch._foreach_add_(v, step)
        if hyper.nesterov:
            torch._foreach_add_(step, v, alpha=hyper.momentum)
        torch._foreach_sub_(w, step if hyper.nesterov else v, alpha=lr)
        return
    torch._fused_sgd_(
        w,
        g,
        v,
        weight_decay=hyper.weight_decay,
        momentum=carry if v else 0.0,
        lr=lr if v else lr * rate,
        dampening=1 - rate if v else 0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
