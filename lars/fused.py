"""LARS on the CPU with torch's fused SGD kernel, which reads and writes each element once.

Memory is what a CPU waits for here, and multi-tensor operators stream every tensor through it
once per operator. SGD's kernel computes ``v = m v + (1 - dampening) (g + l w)``, ``w = w - lr v``
in one pass; with the dampening ``1 - rate`` that is a step of LARS. Norms are taken by BLAS's dot
product, twice as fast as torch's norm and closer to the true value in FP32. Tensors are taken one
by one, so that what the norms have read is still in the cache when it is updated.

Computes what :mod:`~largebatch.lars.reference` defines, with rates in Python's floats: reading
scalars costs nothing on a CPU, and operators on them do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .coefficients import INSIDE
from .memory import flat, laid_out_as, packed
from .reference import Hyper, compute_dtype, lr_change

# Below, 1 - (1 - rate) is not the rate any more to the precision of FP64.
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
    """As :func:`largebatch.lars.reference.update`, of tensors on the CPU."""
    dtype = compute_dtype(weights[0])
    ratios = torch.ones(len(weights), dtype=dtype)
    if found_inf is not None and found_inf.item() > 0:
        return ratios
    lr = float(hyper.lr)
    hyper = replace(hyper, lr=lr, previous_lr=float(hyper.previous_lr))
    inside = lr if dialect in INSIDE else 1.0
    outside = 1.0 if dialect in INSIDE else lr
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
            stays = dialect == "larc" and gradient_norm == 0  # what has no gradient does not decay
            rate = 0.0 if stays else inside * ratio
            one = slice(i, i + 1)
            _move(w[one], g[one], v[one], rate, carry, outside, hyper)
            values.append(ratio)
        ratios = torch.tensor(values, dtype=dtype)
    else:
        _move(w, g, v, inside, carry, outside, hyper)
    for kept, new in ((weights, w), (buffers, v), (halves, w)):
        for old, moved in zip(kept, new, strict=False):
            if old is not moved:
                old.copy_(moved)
    return ratios


def _trust_ratio(
    dialect: str, weight_norm: float, gradient_norm: float, lr: float, hyper: Hyper
) -> float:
    """As :func:`largebatch.lars.reference.trust_ratio`, of one tensor."""
    adapts = weight_norm > 0 and gradient_norm > 0
    ratio = 1.0
    if adapts:
        ratio = hyper.trust_coefficient * weight_norm
        ratio /= gradient_norm + hyper.weight_decay * weight_norm + hyper.eps
    if hyper.trust_clip if dialect != "larc" else adapts:
        ratio = min(ratio / lr, 1.0) if lr > 0 else 1.0
    return ratio


def _move(
    w: list[Tensor],
    g: list[Tensor],
    v: list[Tensor],
    rate: float,
    carry: float,
    lr: float,
    hyper: Hyper,
) -> None:
    """Update tensors that share a rate, in place: the terms are those of ``form.py``."""
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
