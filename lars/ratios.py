"""The trust ratios of the last step that was not skipped, on their device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
    """Return the ratios after a step, which are the last ones where ``found_inf`` is not zero."""
    if last is not None and last.places == places and adapts:
        if found_inf is not None:
            values = torch.where(found_inf > 0, last.values, values)
        if last.in_place:
            return last._replace(values=last.values.copy_(values))
        if captured and found_inf is not None:  # read in each replay, before it is written
            values = last.values.copy_(values)
    return Ratios(places, values, adapts, captured)
