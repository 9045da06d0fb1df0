"""Profile of a model's gradients: their sizes, and when backward produces each.

A profile is estimated from the FLOPs of each layer: the time of a step is distributed in proportion
to them, with twice as many in backward as in forward (each layer computes the gradients of its
input and of its weight). Layers without counted operations, such as norms, take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

#: Share of forward in the operations of a step.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Gradient:
    """One gradient."""

    name: str  #: That of the parameter.
    size_bytes: int  #: In the dtype that DDP reduces.
    ready_seconds: float  #: From the start of backward until the gradient is available.


@dataclass(frozen=True)
class Profile:
    """One training step on one rank, without communication.

    Raises:
        ValueError: there are no gradients, they are out of order, or a time is impossible.
    """

    gradients: tuple[Gradient, ...]  #: In the order in which backward produces them.
    forward_seconds: float  #: Of forward and all else that cannot overlap communication.
    backward_seconds: float  #: Of the backward pass whose gradients are reduced.
    element_bytes: int = 4  #: Size of one element of a gradient.

    def __post_init__(self) -> None:
        ready = [g.ready_seconds for g in self.gradients]
        if not ready or ready != sorted(ready) or ready[0] < 0:
            raise ValueError(
                "gradients: empty or out of order in a profile; valid: ascending ready_seconds, "
                "from 0"
            )
        rounding = 1e-9 * ready[-1]
        if min(self.forward_seconds, self.backward_seconds - ready[-1] + rounding) < 0:
            raise ValueError(
                "a profile has a negative time, or a gradient that is ready after backward"
            )

    @property
    def compute_seconds(self) -> float:
        """Time of the step on one rank, in seconds."""
        return self.forward_seconds + self.backward_seconds

    @property
    def size_bytes(self) -> int:
        """Total size of all gradients."""
        return sum(g.size_bytes for g in self.gradients)

    def scaled(self, compute_seconds: float) -> Profile:
        """Return the same step with all times scaled to a total of ``compute_seconds``."""
        factor = compute_seconds / self.compute_seconds
        return replace(
            self,
            gradients=tuple(
                replace(g, ready_seconds=g.ready_seconds * factor) for g in self.gradients
            ),
            forward_seconds=self.forward_seconds * factor,
            backward_seconds=self.backward_seconds * factor,
        )


def estimate_profile(
    model: nn.Module,
    inputs: Sequence[Any],
    step_seconds: float,
    *,
    gradient_dtype: torch.dtype = torch.float32,
) -> Profile:
    """Estimate a profile by distributing the time of a step over the layers by their FLOPs.

    Args:
        model: model on any device; on ``meta`` nothing is computed.
        inputs: arguments of its forward on the same device, with any batch size.
        step_seconds: time of forward and backward on one rank.
        gradient_dtype: dtype that DDP reduces.

    Raises:
        ValueError: the model has no trainable parameters, or no operations that are counted.
    """
    owners = {
        id(p): (f"{name}.{key}" if name else key, p)
        for name, module in model.named_modules()
        for key, p in module.named_parameters(recurse=False)
        if p.requires_grad
    }
    # Backward runs from the last operation to the first, so a gradient is complete when backward
    # reaches the point at which forward first entered the module that owns the parameter.
    entered: dict[int, tuple[int, int]] = {}  # operations until then, and how many were before
    from torch.utils.flop_counter import FlopCounterMode  # a slow import, which loads Triton

    counter = FlopCounterMode(display=False)

    def enter(module: nn.Module, _: object) -> None:
        place = -counter.get_total_flops(), -len(entered)
        for parameter in module.parameters(recurse=False):
            entered.setdefault(id(parameter), place)

    handles = [module.register_forward_pre_hook(enter) for module in model.modules()]
    try:
        with counter, torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    total = counter.get_total_flops()
    if not owners or not total:
        raise ValueError("the model has no trainable parameters, or no operations that are counted")
    backward_seconds = step_seconds * (1 - FORWARD_SHARE)
    never_used = (0, 1)
    gradients = tuple(
        Gradient(
            owners[key][0],
            owners[key][1].numel() * gradient_dtype.itemsize,
            backward_seconds * (1 + entered.get(key, never_used)[0] / total),
        )
        for key in sorted(owners, key=lambda key: entered.get(key, never_used))
    )
    return Profile(
        gradients, step_seconds * FORWARD_SHARE, backward_seconds, gradient_dtype.itemsize
    )
