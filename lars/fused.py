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

from .coefficients import LR_IN_BUFFER
from .memory import flat, laid_out_as, packed
from .reference import Hyper, compute_dtype, lr_change

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
    lr = float(hyper.lr)
    hyper = replace(hyper, lr=lr, previous_lr=float(hyper.previous_lr))
    inside = lr if dialect in LR_IN_BUFFER else 1.0
    outside = 1.0 if dialect in LR_IN_BUFFER else lr
    carry = hyper.momentum
    if dialect == "mlperf-corrected":
        carry *= float(lr_change(hyper))
    w = [packed(t.to(dtype)) for t in weights]
    g = [laid_out_as(like, t, dtype) for like, t in zip(w, gradients, strict=True)]
    v = [laid_out_as(like, t, dtype) for like, t in zip(w, buffers, strict=False)]
    if inverse_scale is not None:
        g = list(torch._foreach_mul(g, inverse_scale.to(dtype)))
    if hyper.adapt:
        values = []
        for i in range(len(w)):
            weight_norm, gradient_norm = (t.dot(t).item() ** 0.5 for t in flat([w[i], g[i]]))
            ratio = _trust_ratio(dialect, weight_norm, gradient_norm, lr, hyper)
            # apex LARC does not decay a tensor whose gradient is zero, so its step is zero.
            rate = 0.0 if dialect == "larc" and gradient_norm == 0 else inside * ratio
            one = slice(i, i + 1)
            _apply(w[one], g[one], v[one], rate, carry, outside, hyper)
            values.append(ratio)
        ratios = torch.tensor(values, dtype=dtype)
    else:
        _apply(w, g, v, inside, carry, outside, hyper)
    for targets, results in ((weights, w), (buffers, v), (halves, w)):
        for target, result in zip(targets, results, strict=False):
            if target is not result:
                target.copy_(result)
    return ratios


def _trust_ratio(
    dialect: str, weight_norm: float, gradient_norm: float, lr: float, hyper: Hyper
) -> float:
    """Compute the trust ratio of one tensor; see :func:`largebatch.lars.reference.trust_ratio`."""
    adapts = weight_norm > 0 and gradient_norm > 0
    ratio = 1.0
    if adapts:
        ratio = hyper.trust_coefficient * weight_norm
        ratio /= gradient_norm + hyper.weight_decay * weight_norm + hyper.eps
    if hyper.trust_clip if dialect != "larc" else adapts:
        ratio = min(ratio / lr, 1.0) if lr > 0 else 1.0
    return ratio


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
        step = list(torch._foreach_add(g, w, alpha=hyper.weight_decay))
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
