"""LARS on a CUDA GPU in two Triton kernels: one for all norms, one for all updates.

The number of launches does not grow with the number of tensors, because each program of a kernel
looks its tensor up in a table of addresses. The first kernel reads weights and gradients once, and
the momentum too where the trust ratio is that of the momentum. The second reads weights, gradients
and momentum once and writes each result once: it unscales the gradients, computes and applies the
trust ratio, and also rounds the new weights into half-precision parameters. Sums have a fixed
order, so a step is reproducible bit for bit.

No step waits for the device. The table is cached there and copied again only when an address
changes; a CUDA graph copies its own table at each replay. Implements
:mod:`~largebatch.lars.reference`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..coefficients import LR_IN_BUFFER, divisor
from ..memory import laid_out_as, packed
from ..reference import Hyper, as_torch_style, compute_dtype

#: Number of elements that one program updates, and that it loads at a time.
CHUNK, BLOCK = 16_384, 1024

_ALIGNED_BYTES = 16  # the largest load of one GPU thread


def runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and runs on ``device``: a GPU, or the CPU in its interpreter."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return device.type in ("cpu", "cuda") and importlib.util.find_spec("triton") is not None


def captures(device: torch.device) -> bool:
    """Whether work launched on ``device`` now is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


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
    addresses = tuple(tuple(t.data_ptr() for t in tensors) for tensors in (w, g, v, h))
    make_table, make_constants = (_cache_unless_captured(f, device) for f in (_table, _constants))
    table, programs = make_table(addresses, tuple(t.numel() for t in w), device)
    ratios = torch.ones(len(w), dtype=dtype, device=device)
    count = programs.shape[0]
    if count == 0:
        return ratios
    one = torch.ones((), dtype=torch.float64, device=device)
    lr = _scalar(hyper.lr, device)
    numbers = (hyper.momentum, hyper.weight_decay, hyper.trust_coefficient, hyper.eps)
    constants = make_constants(numbers, device)
    partials = torch.empty(2, count, dtype=dtype, device=device)
    scale = one if inverse_scale is None else inverse_scale
    shared: dict[str, Any] = {
        "WEIGHT": kernels.DTYPES[w[0].dtype],
        "GRADIENT": kernels.DTYPES[g[0].dtype],
        "HAS_BUFFER": bool(v),
        "BUFFER": kernels.DTYPES[v[0].dtype if v else dtype],
        "COMPUTE": kernels.DTYPES[dtype],
        "ALIGNED": all(a % _ALIGNED_BYTES == 0 for column in addresses for a in column),
        "CHUNK": CHUNK,
        "BLOCK": BLOCK,
        "DIVISOR": divisor(dialect, hyper).name,
        "NESTEROV": hyper.nesterov,
        "MAXIMIZE": hyper.maximize,
    }
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if hyper.adapt:
            kernels.sums_of_squares[(count,)](
                table, programs, partials, constants, scale, count, **shared
            )
        kernels.update[(count,)](
            table,
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


def _cache_unless_captured(function: Any, device: torch.device) -> Any:
    """Return ``function``, which is cached, or its uncached form during a CUDA graph capture.

    A tensor made during capture has no content until the graph has run, and a cached tensor may be
    evicted while a graph still reads it. Memory allocated during capture, including pinned memory,
    belongs to the graph for as long as the graph lives (torch 2.11).
    """
    return function.__wrapped__ if captures(device) else function


@lru_cache(maxsize=64)  # several times the number of parameter groups and dtypes in use
def _table(
    addresses: tuple[tuple[int, ...], ...], elements: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Build the kernels' table, int64 ``[tensors, 6]``, and programs, int32 ``[programs, 2]``.

    Args:
        addresses: data pointers of weights, gradients, buffers and halves, each one per tensor or
            empty.
        elements: number of elements of each tensor.
        device: where to put both.
    """
    rows: list[list[int]] = []
    programs: list[list[int]] = []
    for i, count in enumerate(elements):
        columns = [column[i] if column else 0 for column in addresses]
        rows.append([*columns, count, len(programs)])
        programs += [[i, chunk] for chunk in range(-(-count // CHUNK))]
    table = _to(torch.tensor(rows, dtype=torch.int64), device)
    return table, _to(torch.tensor(programs, dtype=torch.int32).view(-1, 2), device)


@lru_cache(maxsize=64)
def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    return _to(torch.tensor(values, dtype=torch.float64), device)


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    # From pinned memory, because a copy from pageable memory would wait for the device.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
