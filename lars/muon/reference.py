"""Muon in plain arithmetic, one tensor at a time: the definition that the fast path must match.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum of each hidden
layer by the nearest orthogonal matrix, so that a step changes all singular directions of the layer
alike. LARS sets only the length of a layer's step. With w the weight, g the gradient, b the
momentum buffer and m the momentum::

    b = m b + (1 - m) g
    u = m b + (1 - m) g  (Nesterov), or b
    O = U Vᵀ, where U S Vᵀ is the singular value decomposition of u as a matrix
    w = (1 - lr l) w - lr s O

with the weight decay l, which is decoupled, and one of the factors s of :data:`ADJUST_LR_FNS`. O
does not depend on the size of u: the form of momentum of ``torch.optim.SGD`` (b = m b + g,
u = g + m b, as in airbench94_muon) gives the same steps.

The functions here are pure. They return new tensors and modify none of their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: The factors of a step by torch's names, those of Jordan 2024, Liu et al. 2025 (arXiv 2502.16982),
#: Bernstein 2025 (timm's ``rms_to_rms``), LARS, and airbench94_muon, which has none.
ADJUST_LR_FNS = ("original", "match_rms_adamw", "spectral_unclamped", "trust_ratio", "none")

#: How the weight ``[out, in, ...]`` of a convolution is orthogonalised, by timm's names. It is one
#: matrix ``[out, in x positions]``, or a matrix ``[out, in]`` for each position of the kernel.
CONV_MODES = ("flatten", "batched")


@dataclass(frozen=True)
class Hyper:
    """The hyper-parameters of one parameter group, for one step; ``lr`` may be a 0-d tensor."""

    lr: float | Tensor
    momentum: float
    nesterov: bool = True
    weight_decay: float = 0.0
    adjust_lr_fn: str = "original"
    trust_coefficient: float = 1e-3
    norm_projection: bool = False
    conv_mode: str = "flatten"
    maximize: bool = False


#: Takes matrices ``[..., m, n]`` to orthogonal ones of the same shape.
Orthogonalize = Callable[[Tensor], Tensor]
Result = tuple[Tensor, Tensor, Tensor]


def polar_factor(matrices: Tensor) -> Tensor:
    """Return U Vᵀ of matrices of shape ``[..., m, n]``, by singular value decomposition.

    Directions whose singular value is zero to rounding are left out, so that a zero matrix gives
    zero.
    """
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    rounding = torch.finfo(s.dtype).eps * max(matrices.shape[-2:])
    counts = s > rounding * s[..., :1]
    factor: Tensor = (u * counts.unsqueeze(-2)) @ vh
    return factor


def as_matrices(tensor: Tensor, conv_mode: str) -> Tensor:
    """Return a tensor ``[out, in, ...]`` as matrices, shape ``[matrices, rows, columns]``."""
    if conv_mode == "flatten":
        return tensor.reshape(1, tensor.shape[0], -1)
    return tensor.reshape(*tensor.shape[:2], -1).permute(2, 0, 1)


def from_matrices(matrices: Tensor, shape: torch.Size, conv_mode: str) -> Tensor:
    """Undo :func:`as_matrices`: return a tensor of this shape."""
    if conv_mode == "flatten":
        return matrices.reshape(shape)
    return matrices.permute(1, 2, 0).reshape(shape)


def direction_factor(shape: torch.Size, conv_mode: str) -> float:
    """Return 1 / sqrt(k) for a convolution of k matrices, as timm with ``normalize_spatial``."""
    # With it the direction is about as large with "batched" as with "flatten".
    return 1.0 if conv_mode == "flatten" else math.prod(shape[2:]) ** -0.5


def shape_factor(shape: torch.Size, adjust_lr_fn: str, conv_mode: str) -> float:
    """Return the factor s of the options in which it depends on the shape alone."""
    rows = shape[0]
    columns = shape[1] if conv_mode == "batched" else math.prod(shape[1:])
    if not rows * columns:
        return 1.0
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if adjust_lr_fn == "spectral_unclamped":
        return math.sqrt(rows / columns)
    return 1.0


def trust_ratio(weight_norm: Tensor, direction_norm: Tensor, trust_coefficient: float) -> Tensor:
    """Return t ||w|| / ||O|| of norms of equal, arbitrary shape, and t where either is zero."""
    # O has the size of an orthogonal matrix, whatever the gradient. With a ratio of 1 in place of
    # t, as in LARS, the step of a zero weight would be 1 / t times as long.
    adapts = (weight_norm > 0) & (direction_norm > 0)
    return trust_coefficient * torch.where(adapts, weight_norm / direction_norm, 1.0)


def projected(weight: Tensor) -> Tensor:
    """Return a weight ``[out, ...]`` rescaled to the norm sqrt(out), as in airbench94_muon."""
    # The output of a layer before a norm layer does not depend on the norm of its weight, which
    # only sets how far a step turns the weight.
    norm = weight.norm()
    return weight * torch.where(norm > 0, math.sqrt(weight.shape[0]) / norm, 1.0)


def momentum_step(gradient: Tensor, buffer: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """Return the move u, which will be orthogonalised, and the new buffer."""
    buffer = hyper.momentum * buffer + (1 - hyper.momentum) * gradient
    if not hyper.nesterov:
        return buffer, buffer
    return hyper.momentum * buffer + (1 - hyper.momentum) * gradient, buffer


def muon(
    weight: Tensor,
    gradient: Tensor,
    buffer: Tensor,
    hyper: Hyper,
    orthogonalize: Orthogonalize = polar_factor,
) -> Result:
    """Return the weight ``[out, in, ...]`` and the buffer after a step, and its factor s, 0-d."""
    move, buffer = momentum_step(gradient, buffer, hyper)
    direction = orthogonalize(as_matrices(move, hyper.conv_mode))
    direction = from_matrices(direction, weight.shape, hyper.conv_mode)
    direction = direction_factor(weight.shape, hyper.conv_mode) * direction
    if hyper.norm_projection and hyper.lr > 0:
        weight = projected(weight)
    if hyper.adjust_lr_fn == "trust_ratio":
        factor = trust_ratio(weight.norm(), direction.norm(), hyper.trust_coefficient)
    else:
        factor = weight.new_tensor(shape_factor(weight.shape, hyper.adjust_lr_fn, hyper.conv_mode))
    if not hyper.norm_projection:
        weight = (1 - hyper.lr * hyper.weight_decay) * weight
    return weight - hyper.lr * factor * direction, buffer, factor


def update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    hyper: Hyper,
    inverse_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    halves: Sequence[Tensor] = (),
    *,
    orthogonalize: Orthogonalize = polar_factor,
) -> Tensor:
    """Take one step in place, in FP64, as LARS's reference does; return s, ``[len(weights)]``."""
    factors = []
    for index, (weight, buffer) in enumerate(zip(weights, buffers, strict=True)):
        g = gradients[index].double()
        if inverse_scale is not None:
            g = g * inverse_scale.double()
        if hyper.maximize:
            g = -g
        new = muon(weight.double(), g, buffer.double(), hyper, orthogonalize)
        stored = [(weight, new[0]), (buffer, new[1])]
        stored += [(halves[index], new[0])] if halves else []
        for old, value in stored:
            value = value.to(old.dtype)
            old.copy_(value if found_inf is None else torch.where(found_inf > 0, old, value))
        factors.append(new[2])
    return torch.stack(factors)
