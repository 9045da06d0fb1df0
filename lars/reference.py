"""LARS in plain arithmetic, one tensor at a time: the definition that the fast paths must match.

Published forms of LARS differ in where the learning rate and the trust ratio stand relative to
the momentum buffer, so hyper-parameters tuned for one do not carry over to another. Each form
is one function here. With w the weight, g the gradient, l the weight decay, v the momentum
buffer, m the momentum and t the trust coefficient, all of them use

    q = t ||w|| / (||g|| + l ||w|| + eps)       (You et al. 2017, arXiv 1708.03888, Alg. 1)

with q = 1 where ||w|| or ||g|| is zero, or where the tensor does not adapt.

Every function is pure: it returns the new weight, the new buffer and q, and alters nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hyper:
    """The hyper-parameters of one parameter group, for one step.

    ``lr`` and ``previous_lr``, that of the last step (0 before the first), are numbers or 0-d
    tensors; everything else is a number or a flag.
    """

    lr: float | Tensor
    momentum: float
    weight_decay: float
    trust_coefficient: float
    eps: float
    nesterov: bool
    trust_clip: bool
    adapt: bool
    previous_lr: float | Tensor = 0.0


Result = tuple[Tensor, Tensor, Tensor]


def trust_ratio(weight_norm: Tensor, gradient_norm: Tensor, hyper: Hyper) -> Tensor:
    """The trust ratio q for norms of any (equal) shape.

    With ``trust_clip`` it is min(q / lr, 1), so that the tensor's own learning rate lr · q
    becomes min(q, lr): the "clip" of apex LARC, and timm's ``trust_clip``.
    """
    if not hyper.adapt:
        return torch.ones_like(weight_norm)
    ratio = (hyper.trust_coefficient * weight_norm) / (
        gradient_norm + hyper.weight_decay * weight_norm + hyper.eps
    )
    ratio = torch.where((weight_norm > 0) & (gradient_norm > 0), ratio, torch.ones_like(ratio))
    if hyper.trust_clip:
        ratio = torch.clamp(ratio / hyper.lr, max=1.0)
    return ratio


def lr_change(hyper: Hyper) -> float | Tensor:
    """``lr / previous_lr``, and 1 where there is no previous learning rate or it was 0."""
    lr, previous = hyper.lr, hyper.previous_lr
    if isinstance(previous, Tensor):
        return torch.where(previous > 0, lr / previous, torch.ones_like(previous))
    return lr / previous if previous > 0 else 1.0


def mlperf(weight: Tensor, gradient: Tensor, buffer: Tensor, hyper: Hyper) -> Result:
    """The learning rate inside the buffer: ``v = m v + lr q (g + l w)``, ``w = w - v``.

    You et al. 2017 Alg. 1, and the MLPerf reference (mlcommons/training,
    image_classification/tensorflow2/lars_optimizer.py). After a change of the learning rate the
    buffer still holds steps of the old one. Nesterov as there: ``w = w - (m v + lr q (g + l w))``.
    """
    ratio = trust_ratio(weight.norm(), gradient.norm(), hyper)
    step = (hyper.lr * ratio) * (gradient + hyper.weight_decay * weight)
    buffer = hyper.momentum * buffer + step
    move = hyper.momentum * buffer + step if hyper.nesterov else buffer
    return weight - move, buffer, ratio


def mlperf_corrected(weight: Tensor, gradient: Tensor, buffer: Tensor, hyper: Hyper) -> Result:
    """As :func:`mlperf`, with the steps in the buffer brought to the learning rate of now:
    ``v = m (lr / previous lr) v + lr q (g + l w)``, ``w = w - v``.

    NVIDIA's MLPerf submissions (MXNet, ``SGDwFASTLARS``) and Apache MXNet's ``LARS`` with its
    default ``momentum_correction``; the correction is that of Goyal et al. 2017, section 3,
    remark 2. It is left out while the previous learning rate is 0, as there. From then on it takes
    the steps of :func:`torch_style`. Nesterov, which has no published form here, as that of mlperf.
    """
    return mlperf(weight, gradient, lr_change(hyper) * buffer, hyper)


def torch_style(weight: Tensor, gradient: Tensor, buffer: Tensor, hyper: Hyper) -> Result:
    """The learning rate outside the buffer: ``v = m v + q (g + l w)``, ``w = w - lr v``.

    The form of ``torch.optim.SGD``, taken by timm's ``Lars`` and by torchlars. Nesterov as in
    ``torch.optim.SGD``: ``w = w - lr (q (g + l w) + m v)``.
    """
    ratio = trust_ratio(weight.norm(), gradient.norm(), hyper)
    step = ratio * (gradient + hyper.weight_decay * weight)
    return *_sgd(weight, step, buffer, hyper), ratio


def larc(weight: Tensor, gradient: Tensor, buffer: Tensor, hyper: Hyper) -> Result:
    """apex LARC round SGD (NVIDIA/apex, apex/parallel/LARC.py), with its default ``clip=True``.

    As :func:`torch_style` with ``trust_clip``, except that a tensor of zero weights or zero
    gradients is left to SGD, q = 1, without weight decay.
    """
    norms = weight.norm(), gradient.norm()
    adapts = (norms[0] > 0) & (norms[1] > 0)
    ratio = torch.where(adapts, trust_ratio(*norms, replace(hyper, trust_clip=True)), 1.0)
    decay = torch.where(adapts | (not hyper.adapt), hyper.weight_decay * weight, 0.0)
    step = ratio * (gradient + decay)
    return *_sgd(weight, step, buffer, hyper), ratio


def _sgd(weight: Tensor, step: Tensor, buffer: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor]:
    buffer = hyper.momentum * buffer + step
    move = hyper.momentum * buffer + step if hyper.nesterov else buffer
    return weight - hyper.lr * move, buffer


DIALECTS: dict[str, Callable[[Tensor, Tensor, Tensor, Hyper], Result]] = {
    "mlperf": mlperf,
    "mlperf-corrected": mlperf_corrected,
    "torch": torch_style,
    "larc": larc,
}


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
    """One step of :class:`~largebatch.lars.LARS` over a list of tensors, in place.

    Args:
        dialect: a key of :data:`DIALECTS`.
        weights: the tensors to update (the FP32 masters where there are any), of one dtype and
            on one device.
        gradients: of the same shapes; left as they are.
        buffers: momentum buffers of the same shapes; empty if the momentum is 0.
        hyper: for all of the tensors.
        inverse_scale: 0-d; gradients are multiplied by it before anything else.
        found_inf: 0-d; where it is not zero, weights, buffers and halves keep their bits.
        halves: the half-precision parameters whose masters ``weights`` are; empty if there are
            none. The new weights are rounded into them.

    Arithmetic is in FP32 at least; results are rounded to the dtype of the tensor that holds them.

    Returns:
        The trust ratios, shape ``[len(weights)]``.
    """
    ratios = []
    none = [None] * len(weights)
    for weight, gradient, buffer, half in zip(
        weights, gradients, buffers or none, halves or none, strict=True
    ):
        dtype = compute_dtype(weight)
        g = gradient.to(dtype)
        if inverse_scale is not None:
            g = g * inverse_scale.to(dtype)
        v = torch.zeros_like(g) if buffer is None else buffer.to(dtype)
        new_weight, new_buffer, ratio = DIALECTS[dialect](weight.to(dtype), g, v, hyper)
        for old, new in ((weight, new_weight), (buffer, new_buffer), (half, new_weight)):
            if old is not None:
                new = new.to(old.dtype)
                old.copy_(new if found_inf is None else torch.where(found_inf > 0, old, new))
        ratios.append(ratio)
    return torch.stack(ratios)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that arithmetic on ``tensor`` is done in: FP64 for FP64, else FP32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
