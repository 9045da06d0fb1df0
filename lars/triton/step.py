"""LARS on a CUDA GPU in two Triton kernels: one for all norms, one for all updates.

The number of launches does not grow with the number of tensors, because each program of a kernel
looks its tensor up in a table of addresses. The first kernel reads weights and gradients once. The
second reads weights, gradients and momentum once and writes each result once: it unscales the
gradients, computes and applies the trust ratio, and also rounds the new weights into half-precision
parameters. Sums have a fixed order, so a step is reproducible bit for bit.

No step waits for the device. What the kernels look up is in :mod:`~largebatch.lars.triton.tables`;
of it, only the addresses change in training, where gradients move. Implements
:mod:`~largebatch.lars.reference` but for the dialect
``simclr-popular``, whose trust ratio is that of the momentum: it takes ``foreach``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..coefficients import LR_IN_BUFFER
from ..memory import laid_out_as, packed
from ..reference import Hyper, as_torch_style, compute_dtype
from .tables import CHUNK, addresses_on, number_on, numbers_on, ones_on, programs_on

#: Number of elements that one program loads at a time.
BLOCK = 1024


def runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and runs on ``device``: a GPU, or the CPU in its interpreter."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return device.type in ("cpu", "cuda") and importlib.util.find_spec("triton") is not None


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
    """Take one step in place; see :func:`largebatch.lars.reference.update`."""
    from . import kernels

    if dialect == "larc":
        dialect, hyper = "torch", as_torch_style(hyper)
    device, dtype = weights[0].device, compute_dtype(weights[0])
    w = [packed(t) for t in weights]
    g, v, h = (_laid_out_as_all(w, tensors) for tensors in (gradients, buffers, halves))
    # A tuple of a list takes half the time of a tuple of a generator.
    columns = tuple(tuple([t.data_ptr() for t in tensors]) for tensors in (w, g, v, h))
    addresses = addresses_on(columns, device)
    elements = tuple([t.numel() for t in w])
    sizes, programs = programs_on(elements, device)
    count = programs.shape[0]
    if hyper.adapt and all(elements):  # then the kernel writes every ratio
        ratios = torch.empty(len(w), dtype=dtype, device=device)
    else:
        ratios = ones_on((len(w), dtype), device).values
        ratios = ratios.clone() if hyper.adapt else ratios
    if count == 0:
        return ratios
    one = number_on(1.0, device).values
    lr = _scalar(hyper.lr, device)
    numbers = (hyper.momentum, hyper.weight_decay, hyper.trust_coefficient, hyper.eps)
    constants = numbers_on(numbers, device).values
    partials = torch.empty(2, count, dtype=dtype, device=device) if hyper.adapt else one
    scale = one if inverse_scale is None else inverse_scale
    shared: dict[str, Any] = {
        "WEIGHT": kernels.DTYPES[w[0].dtype],
        "GRADIENT": kernels.DTYPES[g[0].dtype],
        "COMPUTE": kernels.DTYPES[dtype],
        "ALIGNED": addresses.aligned,
        "CHUNK": CHUNK,
        "BLOCK": BLOCK,
        "DECAYED": hyper.denominator == "norm-of-sum",
        "MAXIMIZE": hyper.maximize,
    }
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if hyper.adapt:
            kernels.sums_of_squares[(count,)](
                addresses.table, sizes, programs, partials, constants, scale, count, **shared
            )
        kernels.update[(count,)](
            addresses.table,
            sizes,
            programs,
            partials,
            ratios,
            constants,
            lr,
            _scalar(hyper.previous_lr, device) if dialect == "mlperf-corrected" else lr,
            scale,
            one if found_inf is None else found_inf,
            count,
            **shared,
            HAS_BUFFER=bool(v),
            BUFFER=kernels.DTYPES[v[0].dtype if v else dtype],
            NESTEROV=hyper.nesterov,
            HAS_HALF=bool(h),
            HALF=kernels.DTYPES[h[0].dtype if h else dtype],
            LR_IN_BUFFER=dialect in LR_IN_BUFFER,
            CORRECTED=dialect == "mlperf-corrected",
            CLIP=hyper.trust_clip,
            DECAY_AT_ZERO_NORM=hyper.decay_at_zero_norm,
            ADAPT=hyper.adapt,
            MAY_SKIP=found_inf is not None,
        )
    for targets, results in ((weights, w), (buffers, v), (halves, h)):
        for target, result in zip(targets, results, strict=True):
            if target is not result:
                target.copy_(result)
    return ratios


def _laid_out_as_all(weights: list[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [laid_out_as(w, t, tensors[0].dtype) for w, t in zip(weights, tensors, strict=False)]


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor) and value.device == device:
        return value
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.to(device, non_blocking=True)
    # A number on the host, whose copy from pageable memory could wait for the device.
    return number_on(float(value), device).values
