"""A Muon step over lists of tensors: multi-tensor operators, and matrices of equal shape together.

Implements :mod:`~largebatch.lars.muon.reference` without a host sync, on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..memory import as_dtype, store, workspace
from ..reference import compute_dtype
from .reference import Hyper, direction_factor, shape_factor, trust_ratio

#: Takes moves (momentum, or Nesterov's) to their directions, of the same shapes.
Directions = Callable[[list[Tensor]], list[Tensor]]


def update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    hyper: Hyper,
    inverse_scale: Tensor | None,
    found_inf: Tensor | None,
    halves: Sequence[Tensor],
    directions: Directions,
    *,
    shapes: Sequence[torch.Size] | None = None,
    sum_over_shards: Callable[[Tensor], Tensor] | None = None,
) -> Tensor | None:
    """Take one step in place; return its trust ratios, shape ``[len(weights)]``, if it has them."""
    # Where tensors are this rank's shards, ``shapes`` are those of the whole ones.
    dtype = compute_dtype(weights[0])
    g = as_dtype(gradients, dtype)
    if inverse_scale is not None:
        g = list(torch._foreach_mul(g, inverse_scale.to(dtype)))
    if hyper.maximize:
        g = list(torch._foreach_neg(g))
    v = workspace(buffers, dtype, found_inf)
    torch._foreach_lerp_(v, g, 1 - hyper.momentum)
    moves = list(torch._foreach_lerp(g, v, hyper.momentum)) if hyper.nesterov else v
    step = directions(moves)
    store(buffers, v, found_inf)
    w = workspace(weights, dtype, found_inf)
    shapes = [weight.shape for weight in weights] if shapes is None else shapes
    lr = hyper.lr.to(dtype) if isinstance(hyper.lr, Tensor) else hyper.lr
    if hyper.norm_projection:
        norms = _norms(w, sum_over_shards)
        torch._foreach_mul_(w, _to_norm_of_rows(norms, shapes, lr))
    # Python numbers: the host would wait for the copy of a tensor of them to the device.
    factors = [direction_factor(shape, hyper.conv_mode) for shape in shapes]
    ratios = None
    if hyper.adjust_lr_fn == "trust_ratio":
        _multiply(step, factors)
        norms = _norms([*w, *step], sum_over_shards).view(2, -1)
        ratios = trust_ratio(norms[0], norms[1], hyper.trust_coefficient)
        torch._foreach_mul_(step, list(ratios.unbind()))
    else:
        adjust = [shape_factor(shape, hyper.adjust_lr_fn, hyper.conv_mode) for shape in shapes]
        _multiply(step, [factor * s for factor, s in zip(factors, adjust, strict=True)])
    if hyper.weight_decay and not hyper.norm_projection:
        torch._foreach_mul_(w, 1 - lr * hyper.weight_decay)
    if isinstance(lr, Tensor):
        torch._foreach_mul_(step, lr)
        torch._foreach_sub_(w, step)
    else:
        torch._foreach_sub_(w, step, alpha=lr)
    store(weights, w, found_inf)
    if halves:
        store(halves, w, found_inf)
    return ratios


def directions_of(
    moves: list[Tensor], conv_mode: str, orthogonalize: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Orthogonalise moves ``[out, in, ...]`` of one dtype, those of equal shape in one batch."""
    results = orthogonalized([wide_matrices(move, conv_mode) for move in moves], orthogonalize)
    return [like(matrices, move, conv_mode) for matrices, move in zip(results, moves, strict=True)]


def orthogonalized(
    matrices: Sequence[Tensor], orthogonalize: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Orthogonalise tensors of matrices ``[k, m, n]``, those of equal m and n in one batch."""
    batches: dict[torch.Size, list[int]] = {}
    for index, of_tensor in enumerate(matrices):
        batches.setdefault(of_tensor.shape[1:], []).append(index)
    results: list[Tensor] = list(matrices)
    for indices in batches.values():
        first = matrices[indices[0]]
        if not first.numel():
            continue
        batch = first if len(indices) == 1 else torch.cat([matrices[i] for i in indices])
        parts = orthogonalize(batch).split([len(matrices[i]) for i in indices])
        for index, part in zip(indices, parts, strict=True):
            results[index] = part
    return results


def wide_matrices(tensor: Tensor, conv_mode: str) -> Tensor:
    """Return a tensor as matrices ``[k, m, n]`` with m <= n, transposed where it has more rows."""
    # Positions of a convolution, and columns, are in the order of memory: nothing is copied.
    rows, order = tensor.shape[0], _inner_order(tensor)
    if conv_mode == "batched":
        order.remove(1)
        positions = math.prod(tensor.shape[2:])
        matrices = tensor.permute(*order, 0, 1).reshape(positions, rows, tensor.shape[1])
    else:
        matrices = tensor.permute(0, *order).reshape(1, rows, math.prod(tensor.shape[1:]))
    return matrices if rows <= matrices.shape[2] else matrices.mT


def like(matrices: Tensor, tensor: Tensor, conv_mode: str) -> Tensor:
    """Undo :func:`wide_matrices`: return a tensor of the shape, dtype and layout of ``tensor``."""
    rows, order = tensor.shape[0], _inner_order(tensor)
    if conv_mode == "batched":
        order.remove(1)
        order = [*order, 0, 1]
    else:
        order = [0, *order]
    if matrices.shape[1] != rows:  # the transposed ones
        matrices = matrices.mT
    inverse = [order.index(i) for i in range(len(order))]
    parts = matrices.reshape([tensor.shape[i] for i in order]).permute(inverse)
    return torch.empty_like(tensor).copy_(parts)


def _inner_order(tensor: Tensor) -> list[int]:
    """Return the dimensions after the first in the order of memory."""
    return sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)


def _multiply(tensors: list[Tensor], factors: list[float]) -> None:
    if any(factor != 1 for factor in factors):
        torch._foreach_mul_(tensors, factors)


def _norms(tensors: list[Tensor], sum_over_shards: Callable[[Tensor], Tensor] | None) -> Tensor:
    norms = torch.stack(list(torch._foreach_norm(tensors)))
    return norms if sum_over_shards is None else sum_over_shards(norms.square()).sqrt()


def _to_norm_of_rows(
    norms: Tensor, shapes: Sequence[torch.Size], lr: float | Tensor
) -> list[Tensor]:
    """Return the factors that rescale weights ``[out, ...]`` to the norm sqrt(out)."""
    factors = list(norms.reciprocal().unbind())
    torch._foreach_mul_(factors, [math.sqrt(shape[0]) for shape in shapes])
    # A step at rate 0 changes nothing: torch.distributed.checkpoint creates state by one.
    moves = (norms > 0) & (lr > 0)
    return list(torch.where(moves, torch.stack(factors), 1.0).unbind())
