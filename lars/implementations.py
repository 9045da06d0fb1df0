"""The implementations of a step, and which of them runs on a batch of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from . import foreach, fused, reference
from .batches import Kind
from .sharding import sum_over
from .triton import step as triton_update

Update = Callable[..., Tensor]

#: The implementations by name; all have the signature of :func:`largebatch.lars.reference.update`.
IMPLEMENTATIONS: dict[str, Update] = {
    "reference": reference.update,
    "foreach": foreach.update,
    "fused": fused.update,
    "triton": triton_update.update,
}


def implementation_for(name: str, kind: Kind) -> Update:
    """Return the implementation called ``name`` or, for ``"auto"``, the fastest for a batch.

    Raises:
        ValueError: it does not run on the device of the batch.
    """
    if kind.layout is not None:
        return partial(foreach.update, sum_over_shards=sum_over(kind.layout))
    if name == "auto":
        if torch.compiler.is_compiling():
            name = "foreach"  # the only fast one that can be traced
        elif kind.device.type == "cpu":
            name = "fused"
        else:
            name = "triton" if triton_update.runs_on(kind.device) else "foreach"
    if (name == "fused" and kind.device.type != "cpu") or (
        name == "triton" and not triton_update.runs_on(kind.device)
    ):
        raise ValueError(
            f"implementation {name!r} does not run on {kind.device}; valid there: auto, "
            "foreach, reference"
        )
    return IMPLEMENTATIONS[name]
