"""Batches of tensors that are updated together: of one device, dtype, sharding and adaptation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .groups import adapts, named
from .sharding import Layout, layout_of


class Kind(NamedTuple):
    """The properties that tensors must share to be updated in one batch."""

    device: torch.device
    dtype: torch.dtype
    layout: Layout
    adapts: bool


class Batch(NamedTuple):
    """Parameters of one group and kind that have a gradient, with their places in the group."""

    places: list[int]
    parameters: list[Tensor]
    gradients: list[Tensor]


def batches_of(group: dict[str, Any], index: int, optimizer: str = "LARS") -> dict[Kind, Batch]:
    """Batch the parameters of a group that have a gradient by kind; an unfit one is a TypeError."""
    # Plain tuples take less time to make than named ones, and torch.compile of torch 2.11 does not
    # find the one by the other.
    batches: dict[Any, Batch] = {}
    for place, parameter in enumerate(group["params"]):
        gradient = parameter.grad
        if gradient is None:
            continue
        layout = layout_of(parameter)
        if gradient.layout != torch.strided or layout_of(gradient) != layout:
            raise TypeError(_unfit(named(group, index)[place][0], parameter, gradient, optimizer))
        kind = parameter.device, parameter.dtype, layout, adapts(group, parameter)
        if kind not in batches:
            batches[kind] = Batch([], [], [])
        batch = batches[kind]
        batch.places.append(place)
        batch.parameters.append(parameter)
        batch.gradients.append(gradient)
    return {Kind(*kind): batch for kind, batch in batches.items()}


def _unfit(name: str, parameter: Tensor, gradient: Tensor, optimizer: str) -> str:
    if gradient.layout != torch.strided:
        return f"the gradient of {name} is sparse; {optimizer} takes dense gradients"
    return (
        f"the gradient of {name} is sharded as {layout_of(gradient)}, the parameter as "
        f"{layout_of(parameter)}; both must be sharded alike"
    )
