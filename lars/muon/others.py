"""The steps of the tensors that Muon does not orthogonalise: of SGD, LARS or AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..batches import Batch, Kind
from ..implementations import implementation_for
from ..layerwise import Overflow
from ..reference import Hyper
from ..state import States, tensors_of
from . import adamw


def update(
    group: Mapping[str, Any],
    kind: Kind,
    batch: Batch,
    states: States,
    overflow: Overflow,
    *,
    master_weights: bool,
    implementation: str = "auto",
) -> Tensor | None:
    """Take the step of the rule of a group in place; return its trust ratios, or None."""
    momentum = 0.0 if group["rule"] == "adamw" else group["momentum"]
    weights, gradients, buffers, halves = tensors_of(
        states,
        batch.parameters,
        batch.gradients,
        kind.layout,
        momentum=momentum,
        master_weights=master_weights,
    )
    if group["rule"] == "adamw":
        averages = adamw.prepare(states, batch.parameters, master_weights=master_weights)
        adamw.update(weights, gradients, averages, group, *overflow, halves)
        return None
    # SGD is the dialect of torch without ratios.
    hyper = Hyper(
        lr=group["lr"],
        momentum=momentum,
        weight_decay=group["weight_decay"],
        trust_coefficient=group["trust_coefficient"],
        eps=group["eps"] or 0.0,
        nesterov=group["nesterov"],
        trust_clip=False,
        adapt=kind.adapts and group["rule"] == "lars",
        maximize=group["maximize"],
    )
    step = implementation_for(implementation, kind, "torch")
    ratios = step("torch", weights, gradients, buffers, hyper, *overflow, halves)
    return ratios if hyper.adapt else None
