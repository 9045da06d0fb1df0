"""The trust ratios of the last step that was not skipped, on their device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Ratios(NamedTuple):
    """The trust ratios of one batch of tensors.

    Attributes:
        places: places of the tensors in their group.
        values: the ratios, one per tensor.
        adapts: whether the tensors adapt; else all ratios are 1.
        in_place: whether later steps change ``values`` in place, as those in a CUDA graph do.
    """

    places: list[int]
    values: Tensor
    adapts: bool
    in_place: bool


def after_step(
    last: Ratios | None,
    places: list[int],
    values: Tensor,
    *,
    adapts: bool,
    found_inf: Tensor | None,
    captured: bool,
) -> Ratios:
    """Return the ratios after a step.

    Args:
        last: those before it, if there are any.
        places: as in :class:`Ratios`.
        values: what the step computed.
        adapts: as in :class:`Ratios`.
        found_inf: overflow flag, 0-d; where it is not zero, the last ratios stay.
        captured: whether the step is captured into a CUDA graph. It then writes its ratios to one
            tensor, and so do eager steps after it.
    """
    if last is not None and last.places == places and adapts:
        if found_inf is not None:
            values = torch.where(found_inf > 0, last.values, values)
        if last.in_place:
            return last._replace(values=last.values.copy_(values))
        if captured and found_inf is not None:  # read in each replay, before it is written
            values = last.values.copy_(values)
    return Ratios(places, values, adapts, captured)
