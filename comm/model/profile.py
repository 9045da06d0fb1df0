"""A model's gradients: their sizes, and when backward produces each.

Either measured on this machine, or estimated from the operations of each layer: then the time of
a step is shared out by FLOPs, with twice as many in backward as in forward (each layer computes
the gradients of its input and of its weight). Layers without counted operations, such as norms,
take no time of their own there.
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

#: Of a step's operations, those of forward.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Gradient:
    """One gradient.

    Attributes:
        name: of its parameter.
        size_bytes: in the dtype that DDP reduces.
        ready_seconds: when backward has produced it, counted from the start of backward.
    """

    name: str
    size_bytes: int
    ready_seconds: float


@dataclass(frozen=True)
class Profile:
    """One step of one rank, without communication.

    Attributes:
        gradients: in the order in which backward produces them.
        forward_seconds: of forward, and of all else that does not overlap with communication.
        backward_seconds: of the backward whose gradients are reduced.
        element_bytes: of one number of a gradient.
    """

    gradients: tuple[Gradient, ...]
    forward_seconds: float
    backward_seconds: float
    element_bytes: int = 4

    def __post_init__(self) -> None:
        ready = [g.ready_seconds for g in self.gradients]
        if not ready or ready != sorted(ready) or ready[0] < 0:
            raise ValueError("a profile needs gradients in the order in which they are ready")
        rounding = 1e-9 * ready[-1]
        if min(self.forward_seconds, self.backward_seconds - ready[-1] + rounding) < 0:
            raise ValueError("no time of a profile may be negative, or after backward has ended")

    @property
    def compute_seconds(self) -> float:
        """The step on one rank."""
        return self.forward_seconds + self.backward_seconds

    @property
    def size_bytes(self) -> int:
        """Of all gradients."""
        return sum(g.size_bytes for g in self.gradients)

    def scaled(self, compute_seconds: float) -> Profile:
        """The same step, taking ``compute_seconds`` in all."""
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
    """Share the time of a step out among a model's layers by their FLOPs.

    Args:
        model: on any device; on ``meta`` nothing is computed.
        inputs: of its forward, on the same device; any batch size will do.
        step_seconds: of forward and backward on one rank.
        gradient_dtype: that DDP reduces.

    Raises:
        ValueError: the model has no parameter that is trained, or no operation that is counted.
    """
    owners = {
        id(p): (f"{name}.{key}" if name else key, p)
        for name, module in model.named_modules()
        for key, p in module.named_parameters(recurse=False)
        if p.requires_grad
    }
    events: list[tuple[str, nn.Module, int]] = []
    from torch.utils.flop_counter import FlopCounterMode  # takes a second, and brings in Triton

    counter = FlopCounterMode(display=False)
    handles = []

    def note(what: str, module: nn.Module, *_: object) -> None:
        events.append((what, module, counter.get_total_flops()))

    for module in model.modules():
        handles.append(module.register_forward_pre_hook(partial(note, "enter")))
        handles.append(module.register_forward_hook(partial(note, "leave")))
    try:
        with counter, torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    total = counter.get_total_flops()
    if not owners or not total:
        raise ValueError("the model has no trained parameters, or no operations that are counted")

    # Backward runs from the last operation to the first, so a parameter's gradient is there when
    # it is back at where forward entered the module that owns it, for the first time.
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
    """Measure when backward produces each gradient, on this rank alone.

    Args:
        model: its gradients are left as they are found: none.
        loss: runs forward on a batch and returns the loss, without DDP.
        repeats: times are medians over them.

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
    """Marks in time: of the host, or of the current stream of a GPU."""

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
