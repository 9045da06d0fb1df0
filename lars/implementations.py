"""The implementations of a step, and which of them runs on a batch of tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from . import foreach, fused, reference
from .batches import Kind
from .sharding import sum_over
from .triton import step as triton_update
from .triton.launch import triton_launch_error

Update = Callable[..., Tensor]

_warn_once = cache(partial(warnings.warn, category=RuntimeWarning))

#: The implementations by name; all have the signature of :func:`largebatch.lars.reference.update`.
IMPLEMENTATIONS: dict[str, Update] = {
    "reference": reference.update,
    "foreach": foreach.update,
    "fused": fused.update,
    "triton": triton_update.update,
}


def implementation_for(name: str, kind: Kind, dialect: str) -> Update:
    """Return the implementation called ``name`` or, for ``"auto"``, the fastest for a batch."""
    if kind.layout is not None:
        return partial(foreach.update, sum_over_shards=sum_over(kind.layout))
    problem = None
    if name == "auto":
        name = _fastest(kind.device, dialect)
    elif name == "triton":
        problem = triton_launch_error(kind.device)
        if dialect == "simclr-popular":
            problem = f"it has no dialect {dialect!r}"
    elif name == "fused" and kind.device.type != "cpu":
        problem = "it is for a CPU"
    if problem is not None:
        raise ValueError(
            f"implementation {name!r} does not run on {kind.device}: {problem}; valid there: auto, "
            "foreach, reference"
        )
    return IMPLEMENTATIONS[name]


def triton_error_on_any(devices: Iterable[torch.device]) -> str | None:
    """Return why Triton cannot launch kernels on one of the devices, or None if it can on all."""
    return next(filter(None, map(triton_launch_error, devices)), None)


def _fastest(device: torch.device, dialect: str) -> str:
    if torch.compiler.is_compiling():
        return "foreach"  # the only fast one that can be traced
    if device.type == "cpu":
        return "fused"
    if dialect == "simclr-popular" or not triton_update.runs_on(device):
        return "foreach"
    problem = triton_launch_error(device)
    if problem is None:
        return "triton"
    problem = f"implementation 'auto': Triton launches no kernel on {device}: {problem}"
    # Steps that round differently would let the parameters of the ranks drift apart.
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"{problem}; valid: a C compiler and Python's headers on rank {dist.get_rank()}, or "
            "optimizer.implementation = 'foreach' on all ranks"
        )
    _warn_once(f"{problem}; it takes 'foreach'")
    return "foreach"
