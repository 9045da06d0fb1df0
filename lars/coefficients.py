"""What the fast paths share: each dialect of the reference as coefficients of one update.

v = carry v + rate (g + l w)
w = w - lr v                      or, with Nesterov, w - lr (m v + rate (g + l w))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .reference import Hyper, lr_change, trust_ratio

#: Dialects with the learning rate inside the momentum buffer.
INSIDE = ("mlperf", "mlperf-corrected")


@dataclass(frozen=True)
class Form:
    """The coefficients for some tensors.

    Attributes:
        ratios: the trust ratios, shape ``[n]``.
        rate: shape ``[n]``.
        carry: a number or 0-d.
        lr: a number or 0-d.
    """

    ratios: Tensor
    rate: Tensor
    carry: float | Tensor
    lr: float | Tensor


def form(dialect: str, weight_norms: Tensor, gradient_norms: Tensor, hyper: Hyper) -> Form:
    """The coefficients of a dialect, from norms of shape ``[n]``; nothing waits for the device."""
    clips = dialect == "larc"
    ratios = trust_ratio(
        weight_norms, gradient_norms, replace(hyper, trust_clip=True) if clips else hyper
    )
    rate = ratios * hyper.lr if dialect in INSIDE else ratios
    if clips and hyper.adapt:
        ratios = torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, 1.0)
        # What has no gradient does not decay, so nothing is left of its step.
        rate = torch.where(gradient_norms > 0, ratios, 0.0)
    return Form(
        ratios,
        rate,
        hyper.momentum * lr_change(hyper) if dialect == "mlperf-corrected" else hyper.momentum,
        1.0 if dialect in INSIDE else hyper.lr,
    )
