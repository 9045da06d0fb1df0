"""LARS over lists of tensors with torch's multi-tensor ("foreach") operators, on any device.

Computes what :mod:`~largebatch.lars.reference` defines, in a constant number of passes over all
tensors. On an accelerator nothing is read back to the host; on the CPU, where reading a scalar
costs nothing, ratios are passed as numbers, which torch's CPU kernels take fastest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .reference import Hyper, compute_dtype, trust_ratio


def update(
    dialect: str,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    hyper: Hyper,
    inverse_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """As :func:`largebatch.lars.reference.update`; all weights share one dtype and device."""
    on_host = weights[0].device.type == "cpu"
    lr = hyper.lr
    skip: Tensor | None = found_inf
    if on_host:
        if found_inf is not None and found_inf.item() > 0:
            return torch.ones(len(weights), dtype=compute_dtype(weights[0]))
        skip = None
        lr = float(lr)

    dtype = compute_dtype(weights[0])
    w = _as(weights, dtype)
    g = _as(gradients, dtype)
    if inverse_scale is not None:
        g = list(torch._foreach_mul(g, inverse_scale.to(dtype)))
    ratios = trust_ratio(
        torch.stack(torch._foreach_norm(w)), torch.stack(torch._foreach_norm(g)), hyper
    )

    # step = rate * (g + l w), rate = lr q or q: see the dialect in reference.py
    inside = dialect == "mlperf"
    rate = ratios * lr if inside else ratios
    step = list(torch._foreach_add(g, w, alpha=hyper.weight_decay))
    torch._foreach_mul_(step, rate.tolist() if on_host else list(rate.unbind()))

    if buffers:
        v = _work(buffers, dtype, skip)
        torch._foreach_mul_(v, hyper.momentum)
        torch._foreach_add_(v, step)
        if hyper.nesterov:
            torch._foreach_add_(step, v, alpha=hyper.momentum)
        else:
            step = v
        _store(buffers, v, skip)
    w = _work(weights, dtype, skip)
    if inside:
        torch._foreach_sub_(w, step)
    elif isinstance(lr, Tensor):
        torch._foreach_sub_(w, torch._foreach_mul(step, lr.to(dtype)))
    else:
        torch._foreach_add_(w, step, alpha=-lr)
    _store(weights, w, skip)
    return ratios


def _as(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype) for t in tensors]


def _work(kept: Sequence[Tensor], dtype: torch.dtype, skip: Tensor | None) -> list[Tensor]:
    """Tensors to compute the new value of ``kept`` in: itself where nothing stands against it."""
    work = _as(kept, dtype)
    if skip is not None and kept[0].dtype == dtype:
        return [t.clone() for t in work]
    return work


def _store(kept: Sequence[Tensor], work: Sequence[Tensor], skip: Tensor | None) -> None:
    """Round ``work`` into ``kept``; where ``skip`` is not zero, ``kept`` stays bit for bit."""
    if work[0] is kept[0]:
        return
    if skip is not None:
        work = [torch.where(skip > 0, k, t.to(k.dtype)) for k, t in zip(kept, work, strict=True)]
    torch._foreach_copy_(list(kept), list(work))
