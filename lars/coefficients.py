"""The LARS dialects as coefficients of one update formula, shared by the fast implementations.

Every dialect of :mod:`~largebatch.lars.reference` is an instance of

    v = carry v + rate (g + l w)
    w = w - lr v                  or, with Nesterov, w - lr (m v + rate (g + l w))

with w the weight, g the gradient, l the weight decay, v the momentum buffer and m the momentum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .reference import Hyper, lr_change, trust_ratio

#: Dialects that keep the learning rate inside the momentum buffer.
LR_IN_BUFFER = ("mlperf", "mlperf-corrected")


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of one step for ``n`` tensors.

    Attributes:
        ratios: the trust ratios, shape ``[n]``.
        rate: factor on the decayed gradient, shape ``[n]``.
        carry: factor on the old momentum buffer, a number or a 0-d tensor.
        lr: factor on the step, a number or a 0-d tensor; 1 where ``rate`` includes the learning
            rate.
    """

    ratios: Tensor
    rate: Tensor
    carry: float | Tensor
    lr: float | Tensor


def coefficients(
    dialect: str, weight_norms: Tensor, gradient_norms: Tensor, hyper: Hyper
) -> Coefficients:
    """Compute the coefficients of a dialect, without a host sync.

    Args:
        dialect: a key of :data:`~largebatch.lars.reference.DIALECTS`.
        weight_norms: L2 norms of the weights, shape ``[n]``.
        gradient_norms: L2 norms of the unscaled gradients, shape ``[n]``.
        hyper: the hyper-parameters of all ``n`` tensors.
    """
    is_larc = dialect == "larc"
    ratios = trust_ratio(
        weight_norms, gradient_norms, replace(hyper, trust_clip=True) if is_larc else hyper
    )
    rate = ratios * hyper.lr if dialect in LR_IN_BUFFER else ratios
    if is_larc and hyper.adapt:
        ratios = torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, 1.0)
        # apex LARC does not decay a tensor whose gradient is zero, so its step is zero.
        rate = torch.where(gradient_norms > 0, ratios, 0.0)
    return Coefficients(
        ratios,
        rate,
        hyper.momentum * lr_change(hyper) if dialect == "mlperf-corrected" else hyper.momentum,
        1.0 if dialect in LR_IN_BUFFER else hyper.lr,
    )
