"""LARS in plain arithmetic, one tensor at a time: the definition that the fast paths must match.

Published forms of LARS ("dialects") differ in where the learning rate and the trust ratio are
applied relative to the momentum buffer, so hyper-parameters tuned for one do not carry over to
another. Each dialect is one function here. With w the weight, g the gradient, l the weight decay,
v the momentum buffer, m the momentum and t the trust coefficient, the trust ratio q is one of

    q = t ||w|| / (||g|| + l ||w|| + eps)       (You et al. 2017, arXiv 1708.03888, Alg. 1)
    q = t ||w|| / (||g + l w|| + eps)           (SimCLR, VICReg, Barlow Twins, optax.lars)

by the option ``denominator``, which is independent of the dialect. q = 1 where ||w|| or the norm in
the denominator is zero, or where the tensor does not adapt.

The dialect functions are pure: they return the new weight, the new buffer and q, and modify none
of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hyper:
    """The hyper-parameters of one parameter group, for one step.

    ``lr`` and ``previous_lr`` (the learning rate of the last step, 0 before the first) are numbers
    or 0-d tensors; everything else is a number or a flag.
    """

    lr: float | Tensor
    momentum: float
    weight_decay: float
    trust_coefficient: float
    eps: float
    nesterov: bool
    trust_clip: bool
    adapt: bool
    denominator: str = "sum-of-norms"
    decay_at_zero_norm: bool = True
    maximize: bool = False
    previous_lr: float | Tensor = 0.0


Result = tuple[Tensor, Tensor, Tensor]


def trust_ratio(weight_norm: Tensor, divisor_norm: Tensor, hyper: Hyper) -> Tensor:
    """Compute the trust ratio q from L2 norms of equal, arbitrary shape.

    ``divisor_norm`` is ||g|| where the denominator is ``"sum-of-norms"``, else the norm of the
    tensor that the ratio applies to: g + l w, or the momentum in :func:`simclr_popular`.

    With ``trust_clip`` it is min(q / lr, 1), so that the effective learning rate lr · q of the
    tensor becomes min(q, lr): the "clip" of apex LARC, and timm's ``trust_clip``. Where a norm is
    zero this bounds q = 1 too, as in timm; but not with ``decay_at_zero_norm=False``, as in apex.
    """
    if not hyper.adapt:
        return torch.ones_like(weight_norm)
    denominator = divisor_norm + hyper.eps
    if hyper.denominator == "sum-of-norms":
        denominator = denominator + hyper.weight_decay * weight_norm
    adapts = (weight_norm > 0) & (divisor_norm > 0)
    ratio = torch.where(adapts, hyper.trust_coefficient * weight_norm / denominator, 1.0)
    if hyper.trust_clip:
        clipped = torch.clamp(ratio / hyper.lr, max=1.0)
        ratio = clipped if hyper.decay_at_zero_norm else torch.where(adapts, clipped, 1.0)
    return ratio


def decayed_step(
    weight: Tensor, gradient: Tensor, hyper: Hyper, factor: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return ``factor q (g + l w)`` and q.

    With ``decay_at_zero_norm=False``, a tensor that adapts does not decay where a norm of its ratio
    is zero. That matters where ||g|| is one: where ||w|| or ||g + l w|| is zero, so is the decay or
    the whole step.
    """
    decayed = gradient + hyper.weight_decay * weight
    if hyper.denominator == "norm-of-sum":
        ratio = trust_ratio(weight.norm(), decayed.norm(), hyper)
    else:
        ratio = trust_ratio(weight.norm(), gradient.norm(), hyper)
        if hyper.adapt and not hyper.decay_at_zero_norm:
            decayed = torch.where(gradient.norm() > 0, decayed, 0.0)
    return (factor * ratio) * decayed, ratio


def lr_change(hyper: Hyper) -> float | Tensor:
    """Return ``lr / previous_lr``, or 1 where the previous learning rate is 0 or does not exist."""
    lr, previous = hyper.lr, hyper.previous_lr
    if isinstance(previous, Tensor):
        return torch.where(previous > 0, lr / previous, torch.ones_like(previous))
    return lr / previous if previous > 0 else 1.0


def mlperf(weight: Tensor, gradient: Tensor, buffer: Tensor, hyper: Hyper) -> Result:
    """Learning rate inside the buffer: ``v = m v + lr q (g + l w)``, ``w = w - v``.

    You et al. 2017, Alg. 1, and the MLPerf reference (mlcommons/training,
    image_classification/tensorflow2/lars_optimizer.py). After a change of the learning rate the
    buffer still holds steps of the old one. Nesterov momentum as in the MLPerf reference:
    ``w = w - (m v + lr q (g + l w))``.
    """
    step, ratio = decayed_step(weight, gradient, hyper, hyper.lr)
    buffer = hyper.momentum * buffer + step
    move = hyper.momentum * buffer + step if hyper.nesterov else buffer
    return weight - move, buffer, ratio


def mlperf_corrected(weight: Tensor, gradient: Tensor, buffer: Tensor, hyper: Hyper) -> Result:
    """:func:`mlperf` with the buffer rescaled to the current learning rate.

    ``v = m (lr / previous lr) v + lr q (g + l w)``, ``w = w - v``, as in NVIDIA's MLPerf
    submissions (MXNet, ``SGDwFASTLARS``) and the ``LARS`` of Apache MXNet 1.x with its default
    ``momentum_correction``. The correction is that of Goyal et al. 2017, section 3, remark 2. As
    in those codes, it is omitted while the previous learning rate is 0; from then on the steps are
    those of :func:`torch_style`. No Nesterov form is published; it is that of :func:`mlperf`.
    """
    return mlperf(weight, gradient, lr_change(hyper) * buffer, hyper)


def torch_style(weight: Tensor, gradient: Tensor, buffer: Tensor, hyper: Hyper) -> Result:
    """Learning rate outside the buffer: ``v = m v + q (g + l w)``, ``w = w - lr v``.

    The form of ``torch.optim.SGD``, used by timm's ``Lars`` and by torchlars. Nesterov momentum as
    in ``torch.optim.SGD``: ``w = w - lr (q (g + l w) + m v)``.
    """
    step, ratio = decayed_step(weight, gradient, hyper)
    buffer = hyper.momentum * buffer + step
    move = hyper.momentum * buffer + step if hyper.nesterov else buffer
    return weight - hyper.lr * move, buffer, ratio


def larc(weight: Tensor, gradient: Tensor, buffer: Tensor, hyper: Hyper) -> Result:
    """apex LARC around SGD (NVIDIA/apex, apex/parallel/LARC.py), with its default ``clip=True``.

    :func:`torch_style` with ``trust_clip=True`` and ``decay_at_zero_norm=False``: a tensor whose
    weight norm or gradient norm is zero takes a plain SGD step, q = 1, without weight decay.
    """
    return torch_style(weight, gradient, buffer, as_torch_style(hyper))


def as_torch_style(hyper: Hyper) -> Hyper:
    """Return the options with which :func:`torch_style` is :func:`larc`."""
    return replace(hyper, trust_clip=True, decay_at_zero_norm=False)


def simclr_popular(weight: Tensor, gradient: Tensor, buffer: Tensor, hyper: Hyper) -> Result:
    """Trust ratio of the momentum: ``v = m v + (g + l w)``, ``w = w - lr q v``, q = t||w|| / ||v||.

    The "popular" momentum of SimCLR's LARS (google-research/simclr, lars_optimizer.py, with
    ``classic_momentum=False``). With Nesterov momentum, ``m v + (g + l w)`` takes the place of v in
    the step and in the ratio. The option ``denominator`` has no effect.
    """
    decayed = gradient + hyper.weight_decay * weight
    buffer = hyper.momentum * buffer + decayed
    move = hyper.momentum * buffer + decayed if hyper.nesterov else buffer
    of_move = replace(hyper, denominator="norm-of-sum")
    ratio = trust_ratio(weight.norm(), move.norm(), of_move)
    return weight - (hyper.lr * ratio) * move, buffer, ratio


#: The dialects by name.
DIALECTS: dict[str, Callable[[Tensor, Tensor, Tensor, Hyper], Result]] = {
    "mlperf": mlperf,
    "mlperf-corrected": mlperf_corrected,
    "torch": torch_style,
    "larc": larc,
    "simclr-popular": simclr_popular,
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
    """Take one step of :class:`~largebatch.lars.LARS` on a list of tensors, in place.

    Args:
        dialect: a key of :data:`DIALECTS`.
        weights: the tensors to update (the FP32 masters, if there are any), of one dtype and on
            one device.
        gradients: gradients of the same shapes; they are not modified.
        buffers: momentum buffers of the same shapes; empty if the momentum is 0.
        hyper: the hyper-parameters of all these tensors.
        inverse_scale: reciprocal of the loss scale, 0-d; gradients are multiplied by it first.
        found_inf: overflow flag, 0-d; where it is not zero, weights, buffers and halves stay
            unchanged bit for bit.
        halves: the half-precision parameters whose masters are ``weights``; empty if there are
            none. The new weights are rounded into them.

    Arithmetic is in FP32 or, for FP64 weights, in FP64; each result is rounded to the dtype of the
    tensor that stores it.

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
        if hyper.maximize:
            g = -g
        v = torch.zeros_like(g) if buffer is None else buffer.to(dtype)
        new_weight, new_buffer, ratio = DIALECTS[dialect](weight.to(dtype), g, v, hyper)
        for old, new in ((weight, new_weight), (buffer, new_buffer), (half, new_weight)):
            if old is not None:
                new = new.to(old.dtype)
                old.copy_(new if found_inf is None else torch.where(found_inf > 0, old, new))
        ratios.append(ratio)
    return torch.stack(ratios)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of arithmetic on ``tensor``: FP64 for FP64, else FP32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
