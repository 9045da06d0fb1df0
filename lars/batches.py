"""Batches of tensors that are updated together, and the trust ratios of each batch."""

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
    """Group the parameters that have a gradient by kind; raise TypeError for an unfit gradient."""
    # The keys are plain tuples, which are faster to make than named ones; torch.compile of torch
    # 2.11 does not find an item by a key of the other kind.
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


class Ratios(NamedTuple):
    """The trust ratios of one batch of tensors."""

    places: list[int]  # of the tensors in their group
    values: Tensor  # one per tensor
    adapts: bool  # else all ratios are 1
    in_place: bool  # whether later steps change ``values`` in place, as those in a CUDA graph do


def after_step(
    last: Ratios | None,
    places: list[int],
    values: Tensor,
    *,
    adapts: bool,
    found_inf: Tensor | None,
    captured: bool,
) -> Ratios:
    """Return the ratios after a step: those of the step before where ``found_inf`` is not zero."""
    if last is not None and last.places == places and adapts:
        if found_inf is not None:
            values = torch.where(found_inf > 0, last.values, values)
        if last.in_place:
            return last._replace(values=last.values.copy_(values))
        if captured and found_inf is not None:  # each replay reads it before writing
            values = last.values.copy_(values)
    return Ratios(places, values, adapts, captured)
