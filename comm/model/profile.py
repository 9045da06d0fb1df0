"""Profile of a model's gradients: their sizes, and when backward produces each.

A profile is either measured on this machine or estimated from the FLOPs of each layer. The
estimate distributes the time of a step in proportion to FLOPs, with twice as many in backward as in
forward (each layer computes the gradients of its input and of its weight). Layers without counted
operations, such as norms, take no time in the estimate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

#: Share of forward in the operations of a step.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Gradient:
    """One gradient.

    Attributes:
        name: name of the parameter.
        size_bytes: size in the dtype that DDP reduces.
        ready_seconds: time from the start of backward until the gradient is available.
    """

    name: str
    size_bytes: int
    ready_seconds: float


@dataclass(frozen=True)
class Profile:
    """One training step on one rank, without communication.

    Attributes:
        gradients: gradients in the order in which backward produces them.
        forward_seconds: time of forward and of everything else that cannot overlap communication.
        backward_seconds: time of the backward pass whose gradients are reduced.
        element_bytes: size of one element of a gradient.

    Raises:
        ValueError: there are no gradients, they are out of order, or a time is impossible.
    """

    gradients: tuple[Gradient, ...]
    forward_seconds: float
    backward_seconds: float
    element_bytes: int = 4

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
    events: list[tuple[str, nn.Module, int]] = []
    from torch.utils.flop_counter import FlopCounterMode  # a slow import, which loads Triton

    counter = FlopCounterMode(display=False)
    handles = []

    def record(what: str, module: nn.Module, *_: object) -> None:
        events.append((what, module, counter.get_total_flops()))

    for module in model.modules():
        handles.append(module.register_forward_pre_hook(partial(record, "enter")))
        handles.append(module.register_forward_hook(partial(record, "leave")))
    try:
        with counter, torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    total = counter.get_total_flops()
    if not owners or not total:
        raise ValueError("the model has no trainable parameters, or no operations that are counted")

    # Backward runs from the last operation to the first, so a gradient is complete when backward
    # reaches the point at which forward first entered the module that owns the parameter.
    backward_seconds = step_seconds * (1 - FORWARD_SHARE)
    entered: dict[int, tuple[float, int]] = {}
    for place, (what, module, flops) in enumerate(events):
        if what == "enter":
            for parameter in module.parameters(recurse=False):
                ready = backward_seconds * (1 - flops / total)
                entered.setdefault(id(parameter), (ready, -place))
    never_used = (backward_seconds, 1)
    order = sorted(owners, key=lambda key: entered.get(key, never_used))
    gradients = tuple(
        Gradient(
            owners[key][0],
            owners[key][1].numel() * gradient_dtype.itemsize,
            entered.get(key, never_used)[0],
        )
        for key in order
    )
    return Profile(
        gradients, step_seconds * FORWARD_SHARE, backward_seconds, gradient_dtype.itemsize
    )


def measure_profile(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    repeats: int = 5,
    warm_up: int = 2,
) -> Profile:
    """Measure when backward produces each gradient, without communication.

    Args:
        model: a model without gradients; they are None again afterwards.
        loss: function that runs forward on a batch, without DDP, and returns the loss.
        repeats: number of measured steps; times are their medians.
        warm_up: number of steps before the measured ones.

    Raises:
        ValueError: backward produced no gradient.
    """
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    clock = _Clock(next(iter(parameters.values())).device) if parameters else _Clock()
    marks: dict[str, Any] = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: marks.__setitem__(name, clock.mark())
        )
        for name, parameter in parameters.items()
    ]
    steps: list[dict[str, float]] = []
    forward: list[float] = []
    backward: list[float] = []
    try:
        for repeat in range(warm_up + repeats):
            marks.clear()
            start = clock.mark()
            value = loss()
            between = clock.mark()
            value.backward()
            end = clock.mark()
            if repeat >= warm_up:
                forward.append(clock.seconds(start, between))
                backward.append(clock.seconds(between, end))
                steps.append({n: clock.seconds(between, mark) for n, mark in marks.items()})
            model.zero_grad(set_to_none=True)
    finally:
        for handle in handles:
            handle.remove()
    if not marks:
        raise ValueError("backward produced no gradient")
    ready = {name: statistics.median(step[name] for step in steps) for name in marks}
    last = max(statistics.median(backward), *ready.values())
    names = sorted(ready, key=lambda name: ready[name])
    gradients = tuple(
        Gradient(n, parameters[n].numel() * parameters[n].element_size(), ready[n]) for n in names
    )
    element_bytes = parameters[names[0]].element_size()
    return Profile(gradients, statistics.median(forward), last, element_bytes)


class _Clock:
    """Records times: of the host clock, or of events on the current CUDA stream."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._cuda = device is not None and device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
