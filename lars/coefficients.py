"""The LARS dialects as coefficients of one update formula, shared by the fast implementations.

Every dialect of :mod:`~largebatch.lars.reference` is an instance of

    v = carry v + rate (g + l w)
    w = w - lr v                  or, with Nesterov, w - lr (m v + rate (g + l w))

with w the weight, g the gradient, l the weight decay, v the momentum buffer and m the momentum.
They differ in the coefficients, and in the tensor whose norm divides the trust ratio
(:func:`divisor`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from .reference import Hyper, as_torch_style, lr_change, trust_ratio

#: Dialects that keep the learning rate inside the momentum buffer.
LR_IN_BUFFER = ("mlperf", "mlperf-corrected")


class Divisor(Enum):
    """The tensor whose norm divides the trust ratio."""

    GRADIENT = "g"
    DECAYED = "g + l w"
    MOVE = "v, or with Nesterov m v + g + l w"


def divisor(dialect: str, hyper: Hyper) -> Divisor:
    """Return the tensor whose norm divides the trust ratio."""
    if dialect == "simclr-popular":
        return Divisor.MOVE
    return Divisor.DECAYED if hyper.denominator == "norm-of-sum" else Divisor.GRADIENT


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of one step for ``n`` tensors."""

    ratios: Tensor  # the trust ratios, shape [n]
    rate: Tensor  # factor on the decayed gradient, shape [n]
    carry: float | Tensor  # factor on the old momentum buffer, a number or 0-d
    #: Factor on the step: a number, 0-d, or [n] where the trust ratio is that of the step; 1 where
    #: ``rate`` includes the learning rate.
    lr: float | Tensor


def coefficients(
    dialect: str, weight_norms: Tensor, divisor_norms: Tensor, hyper: Hyper
) -> Coefficients:
    """Compute the coefficients of ``n`` tensors from norms, shape ``[n]``, without a host sync."""
    divides = divisor(dialect, hyper)
    if dialect == "larc":
        hyper = as_torch_style(hyper)
    if divides is Divisor.MOVE:
        hyper = replace(hyper, denominator="norm-of-sum")
        ratios = trust_ratio(weight_norms, divisor_norms, hyper)
        return Coefficients(ratios, torch.ones_like(ratios), hyper.momentum, ratios * hyper.lr)
    ratios = trust_ratio(weight_norms, divisor_norms, hyper)
    rate = ratios * hyper.lr if dialect in LR_IN_BUFFER else ratios
    if divides is Divisor.GRADIENT and hyper.adapt and not hyper.decay_at_zero_norm:
        # A tensor whose gradient is zero does not decay, so its step is zero.
        rate = torch.where(divisor_norms > 0, rate, 0.0)
    return Coefficients(
        ratios,
        rate,
        hyper.momentum * lr_change(hyper) if dialect == "mlperf-corrected" else hyper.momentum,
        1.0 if dialect in LR_IN_BUFFER else hyper.lr,
    )


def coefficients_of_one(
    dialect: str, weight_norm: float, divisor_norm: float, hyper: Hyper
) -> tuple[float, float, float, float]:
    """Compute ratio, rate, carry and lr of one tensor, in a hundredth of the time of the above."""
    lr, divides = float(hyper.lr), divisor(dialect, hyper)
    if dialect == "larc":
        hyper = as_torch_style(hyper)
    ratio, step = 1.0, 1.0
    if hyper.adapt:
        adapts = weight_norm > 0 and divisor_norm > 0
        if adapts:
            of_weight = hyper.weight_decay if divides is Divisor.GRADIENT else 0.0
            ratio = hyper.trust_coefficient * weight_norm
            ratio /= divisor_norm + of_weight * weight_norm + hyper.eps
        if hyper.trust_clip and (adapts or hyper.decay_at_zero_norm):
            ratio = min(ratio / lr, 1.0) if lr > 0 else 1.0
        step = ratio
        if divides is Divisor.GRADIENT and not hyper.decay_at_zero_norm and divisor_norm == 0:
            step = 0.0
    if divides is Divisor.MOVE:
        return ratio, 1.0, hyper.momentum, step * lr
    if dialect in LR_IN_BUFFER:
        carry = hyper.momentum
        if dialect == "mlperf-corrected":
            carry *= float(lr_change(hyper))
        return ratio, step * lr, carry, 1.0
    return ratio, step, hyper.momentum, lr
