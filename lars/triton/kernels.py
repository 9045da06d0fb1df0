"""The Triton kernels launched by :mod:`~largebatch.lars.triton.step`.

A program works on one chunk of one tensor. ``programs`` holds (tensor, chunk) of each program,
``addresses`` those of the weight, gradient, momentum buffer and half-precision copy of each tensor,
and ``sizes`` its number of elements and its first program. Full chunks are loaded and
stored without masks, because a mask keeps the compiler from moving 16 bytes at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_PARTIALS = tl.constexpr(256)  # number of partial sums added at a time

#: Triton's name of each torch dtype that the kernels support.
DTYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit
def _pointer(addresses, tensor, column: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(addresses + 4 * tensor + column).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(pointer, at, elements, COMPUTE: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer + at, mask=at < elements, other=0.0).to(COMPUTE)
    else:
        return tl.load(pointer + at).to(COMPUTE)


@triton.jit
def _store(pointer, at, elements, value, TYPE: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + at, value.to(TYPE), mask=at < elements)
    else:
        tl.store(pointer + at, value.to(TYPE))


@triton.jit
def _scale(scale_at, COMPUTE: tl.constexpr, MAXIMIZE: tl.constexpr):
    scale = tl.load(scale_at).to(COMPUTE)
    if MAXIMIZE:
        scale = -scale
    return scale


@triton.jit
def _sums(
    weight,
    gradient,
    scale,
    decay,
    start,
    elements,
    DECAYED: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    of_weight = tl.zeros([BLOCK], COMPUTE)
    of_divisor = tl.zeros([BLOCK], COMPUTE)
    end = tl.minimum(start + CHUNK, elements)
    while start < end:  # ends early for the many small tensors of a network
        at = start + tl.arange(0, BLOCK)
        w = _load(weight, at, elements, COMPUTE, MASKED)
        divisor = _load(gradient, at, elements, COMPUTE, MASKED) * scale
        if DECAYED:
            divisor += decay * w
        of_weight += w * w
        of_divisor += divisor * divisor
        start += BLOCK
    return tl.sum(of_weight), tl.sum(of_divisor)


@triton.jit
def sums_of_squares(
    addresses,
    sizes,
    programs,
    partials,
    constants,
    scale_at,
    count,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    DECAYED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
):
    """Write each program's sums of squares to ``partials``, shape ``[2, count]``.

    Row 0 is of the weight, row 1 of what divides the trust ratio: the gradient or, if ``DECAYED``,
    the gradient with the weight decay.
    """
    program = tl.program_id(0)
    tensor = tl.load(programs + 2 * program)
    start = tl.load(programs + 2 * program + 1).to(tl.int64) * CHUNK
    elements = tl.load(sizes + 2 * tensor)
    weight = _pointer(addresses, tensor, 0, WEIGHT, ALIGNED)
    gradient = _pointer(addresses, tensor, 1, GRADIENT, ALIGNED)
    decay = tl.load(constants + 1).to(COMPUTE)
    scale = _scale(scale_at, COMPUTE, MAXIMIZE)
    if start + CHUNK <= elements:
        of_weight, of_divisor = _sums(
            weight, gradient, scale, decay, start, elements, DECAYED, COMPUTE, CHUNK, BLOCK, False
        )
    else:
        of_weight, of_divisor = _sums(
            weight, gradient, scale, decay, start, elements, DECAYED, COMPUTE, CHUNK, BLOCK, True
        )
    tl.store(partials + program, of_weight)
    tl.store(partials + count + program, of_divisor)


@triton.jit
def _norm(partials, count, COMPUTE: tl.constexpr):
    total = tl.zeros([_PARTIALS], COMPUTE)
    offset = count * 0
    while offset < count:
        at = offset + tl.arange(0, _PARTIALS)
        total += tl.load(partials + at, mask=at < count, other=0.0)
        offset += _PARTIALS
    return tl.sqrt(tl.sum(total))


@triton.jit
def _apply(
    weight,
    gradient,
    buffer,
    half,
    scale,
    decay,
    rate,
    carry,
    momentum,
    lr,
    start,
    elements,
    WEIGHT: tl.constexpr,
    HAS_BUFFER: tl.constexpr,
    BUFFER: tl.constexpr,
    HAS_HALF: tl.constexpr,
    HALF: tl.constexpr,
    NESTEROV: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    end = tl.minimum(start + CHUNK, elements)
    while start < end:
        at = start + tl.arange(0, BLOCK)
        w = _load(weight, at, elements, COMPUTE, MASKED)
        step = rate * (_load(gradient, at, elements, COMPUTE, MASKED) * scale + decay * w)
        if HAS_BUFFER:
            v = carry * _load(buffer, at, elements, COMPUTE, MASKED) + step
            _store(buffer, at, elements, v, BUFFER, MASKED)
            if NESTEROV:
                step = momentum * v + step
            else:
                step = v
        w = w - lr * step
        _store(weight, at, elements, w, WEIGHT, MASKED)
        if HAS_HALF:
            _store(half, at, elements, w, HALF, MASKED)
        start += BLOCK


@triton.jit
def update(
    addresses,
    sizes,
    programs,
    partials,
    ratios,
    constants,
    lr_at,
    previous_lr_at,
    scale_at,
    found_inf_at,
    count,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BUFFER: tl.constexpr,
    BUFFER: tl.constexpr,
    HAS_HALF: tl.constexpr,
    HALF: tl.constexpr,
    LR_IN_BUFFER: tl.constexpr,
    CORRECTED: tl.constexpr,
    DECAYED: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    CLIP: tl.constexpr,
    DECAY_AT_ZERO_NORM: tl.constexpr,
    ADAPT: tl.constexpr,
    MAY_SKIP: tl.constexpr,
):
    """Update every weight by the formula of the dialect, and write the trust ratios."""
    program = tl.program_id(0)
    tensor = tl.load(programs + 2 * program)
    start = tl.load(programs + 2 * program + 1).to(tl.int64) * CHUNK
    elements = tl.load(sizes + 2 * tensor)

    momentum = tl.load(constants).to(COMPUTE)
    decay = tl.load(constants + 1).to(COMPUTE)
    lr = tl.load(lr_at).to(COMPUTE)
    rate = tl.full((), 1.0, COMPUTE)
    if ADAPT:
        trust_coefficient = tl.load(constants + 2).to(COMPUTE)
        eps = tl.load(constants + 3).to(COMPUTE)
        own = partials + tl.load(sizes + 2 * tensor + 1)
        chunks = tl.cdiv(elements, CHUNK)
        weight_norm = _norm(own, chunks, COMPUTE)
        divisor_norm = _norm(own + count, chunks, COMPUTE)
        adapts = (weight_norm > 0) & (divisor_norm > 0)
        denominator = divisor_norm + eps
        if not DECAYED:
            denominator += decay * weight_norm
        ratio = tl.where(adapts, trust_coefficient * weight_norm / denominator, 1.0)
        if CLIP:
            clipped = tl.minimum(ratio / lr, 1.0)
            if DECAY_AT_ZERO_NORM:
                ratio = clipped
            else:
                ratio = tl.where(adapts, clipped, 1.0)
        if start == 0:
            tl.store(ratios + tensor, ratio)
        rate = ratio
        if not DECAYED and not DECAY_AT_ZERO_NORM:
            rate = tl.where(divisor_norm > 0, ratio, 0.0)  # without a gradient, no step
    carry = momentum
    if CORRECTED:
        previous_lr = tl.load(previous_lr_at).to(COMPUTE)
        changes = previous_lr > 0
        carry = momentum * tl.where(changes, lr / tl.where(changes, previous_lr, 1.0), 1.0)
    if LR_IN_BUFFER:
        rate = lr * rate
        lr = tl.full((), 1.0, COMPUTE)

    if MAY_SKIP:
        elements = tl.where(tl.load(found_inf_at) > 0, 0, elements)
    weight = _pointer(addresses, tensor, 0, WEIGHT, ALIGNED)
    gradient = _pointer(addresses, tensor, 1, GRADIENT, ALIGNED)
    buffer = _pointer(addresses, tensor, 2, BUFFER, ALIGNED)
    half = _pointer(addresses, tensor, 3, HALF, ALIGNED)
    scale = _scale(scale_at, COMPUTE, MAXIMIZE)
    if start + CHUNK <= elements:
        _apply(
            weight, gradient, buffer, half, scale, decay, rate, carry, momentum, lr, start,
            elements, WEIGHT, HAS_BUFFER, BUFFER, HAS_HALF, HALF, NESTEROV, COMPUTE, CHUNK, BLOCK,
            False,
        )  # fmt: skip
    else:
        _apply(
            weight, gradient, buffer, half, scale, decay, rate, carry, momentum, lr, start,
            elements, WEIGHT, HAS_BUFFER, BUFFER, HAS_HALF, HALF, NESTEROV, COMPUTE, CHUNK, BLOCK,
            True,
        )  # fmt: skip
