"""The timekeeper of a run: parts of its wall time, phases of its steps, and the time left.

None of its clocks makes the host wait for a device, but where the meters are read.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....comm import ranged
from ..timeline import Timeline

# --- the parts of a run ---------------------------------------------------------------------

#: The parts of a run's wall time, in the order in which they are shown.
PARTS = ("training", "evaluation", "checkpoints", "start_up", "rest")

#: The parts of training that lines of metrics may hold, in the order in which they are shown, and
#: what every screen and page calls them.
PHASES = {
    "input_seconds": "waiting for data",
    "copy_seconds": "copying to the device",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "all_reduce_seconds": "all-reduce wait",
    "optimizer_seconds": "optimizer",
}


class RunClock:
    """Divides the wall time of a run among its parts, which always add up to it."""

    def __init__(self, before: float = 0.0, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._part, self._since = now, "start_up", now()
        self._spent = {**dict.fromkeys(PARTS, 0.0), "start_up": before}
        self._phases: dict[str, float] = {}
        self.lasted: dict[str, float] = {}

    def begin(self, part: str) -> None:
        """Count the time from now on to another of :data:`PARTS`."""
        now = self._now()
        self._spent[self._part] += now - self._since
        self._part, self._since = part, now

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Context manager whose body is of another part; afterwards that from before goes on."""
        before, start = self._part, self._now()
        self.begin(part)
        try:
            yield
        finally:
            self.begin(before)
            self.lasted[part] = self._since - start

    def spent(self) -> dict[str, float]:
        """Return the seconds so far by part; their sum is the time since the start."""
        self.begin(self._part)
        return dict(self._spent)

    def read(self, values: Mapping[str, float]) -> None:
        """Add the metrics of a reading."""
        for name in PHASES:
            if name in values:
                self._phases[name] = self._phases.get(name, 0.0) + values[name]

    def facts(self) -> dict[str, Any]:
        """Return what a run's files hold of this, in seconds."""
        spent = {name: round(seconds, 3) for name, seconds in self.spent().items()}
        phases = {name: round(self._phases[name], 3) for name in PHASES if name in self._phases}
        return {
            "time_spent": {**spent, "total": round(sum(spent.values()), 3)},
            "training_time": phases,
        }


# --- the phases of a step -------------------------------------------------------------------

#: Phases, as they are named in profiles.
INPUT_WAIT = "input wait"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
#: These are named in profiles, and not measured.
METERS = "meters"
AVERAGE = "average of the weights"
#: These are measured, and have no range in a profile.
HOST_TO_DEVICE = "host to device"
ALL_REDUCE_WAIT = "all-reduce wait"

#: Pairs of events that are kept before those that have passed are added up, to bound their number
#: where the meters are read once an epoch.
KEPT = 512


class HostEvent:
    """A point in time of the host, in the form of ``torch.cuda.Event``."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return 1000 * (end.seconds - self.seconds)


class Phases:
    """Measures the phases of the steps of a run, and names them for torch.profiler.

    With ``reduced``, the model inside of DDP, the wait for the all-reduce is measured: the time
    from a rank's own last gradient to the last reduced one.
    """

    def __init__(
        self,
        device: torch.device,
        reduced: nn.Module | None = None,
        new_event: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._on_gpu, self._clock = device.type == "cuda", clock
        of_device = (lambda: torch.cuda.Event(enable_timing=True)) if self._on_gpu else HostEvent
        self._new_event, self._free = new_event or of_device, list[Any]()
        self._pending: deque[tuple[str, Any, Any, float]] = deque()
        self._sums: dict[str, float] = defaultdict(float)
        self._is_reduced = reduced is not None
        self._handles = {
            parameter: parameter.register_post_accumulate_grad_hook(self._gradient)
            for parameter in (reduced.parameters() if reduced else ())
            if parameter.requires_grad
        }
        self._last: Tensor | None = None
        self._ready: Any = None  # when the last gradient came
        self._measures = False  # whether a step is being taken
        self._steps = 0  # since the last reading

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager around a step, outside of which nothing is measured."""
        self._measures = True
        try:
            yield
        finally:
            self._measures = False
            self._steps += 1

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Context manager around a phase."""
        # A host that waits for its input while the stream still computes holds nothing up: the
        # lesser of their two waits counts, and the rest of the stream's is the copy.
        start, since = self._now() if self._measures else None, self._clock()
        with ranged(name):
            yield
        if start is not None:
            copies = self._on_gpu and name == INPUT_WAIT
            self._add(name, start, self._clock() - since if copies else math.inf)

    def _gradient(self, parameter: Tensor) -> None:
        self._last = parameter
        self._ready = self._now()

    def backward_returned(self) -> None:
        """Note that the step's last backward pass has returned, with all gradients reduced."""
        ready, self._ready = self._ready, None
        if len(self._handles) > 1 and self._last is not None:  # the others need no hook any more
            for parameter in [p for p in self._handles if p is not self._last]:
                self._handles.pop(parameter).remove()
        if ready is not None:
            self._add(ALL_REDUCE_WAIT, ready)

    def read(self) -> dict[str, float]:
        """Return seconds by phase since the last reading; waits for the device."""
        while self._pending:
            self._pending[0][2].synchronize()
            self._add_first()
        sums, self._sums = self._sums, defaultdict(float)
        steps, self._steps = self._steps, 0
        if not steps:
            return {}
        wait = sums[ALL_REDUCE_WAIT]
        return {
            "input_seconds": sums[INPUT_WAIT],
            "forward_seconds": sums[FORWARD],
            "backward_seconds": max(0.0, sums[BACKWARD] - wait),
            "optimizer_seconds": sums[OPTIMIZER],
            **({"all_reduce_seconds": wait} if self._is_reduced else {}),
            **({"copy_seconds": sums[HOST_TO_DEVICE]} if self._on_gpu else {}),
        }

    def _now(self) -> Any:
        """The present point in time, in the order of the device's work."""
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def _add(self, name: str, start: Any, at_most: float = math.inf) -> None:
        """Add the time since ``start`` to a phase; what is above ``at_most`` is that of a copy."""
        self._pending.append((name, start, self._now(), at_most))
        if len(self._pending) > KEPT:
            while self._pending and self._pending[0][2].query():  # which does not wait
                self._add_first()

    def _add_first(self) -> None:
        name, start, end, at_most = self._pending.popleft()
        seconds = start.elapsed_time(end) / 1000
        self._sums[name] += min(seconds, at_most)
        self._sums[HOST_TO_DEVICE] += max(0.0, seconds - at_most)
        self._free += [start, end]


# --- the time left --------------------------------------------------------------------------


class TimeLeft:
    """Estimates how long a run still takes, from its pace in pixels since its first reading."""

    def __init__(
        self, timeline: Timeline, last_step: int, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._timeline, self._last, self._now = timeline, last_step, now
        self._first: tuple[float, float] | None = None  # pixels and time of the first reading

    def seconds(self, step: int) -> float | None:
        """Return the time that the run still takes after ``step`` steps; None if not known yet."""
        pixels, now = self._pixels(step), self._now()
        if self._first is None:
            self._first = pixels, now
        made = pixels - self._first[0]
        return (now - self._first[1]) / made * (self._pixels(self._last) - pixels) if made else None

    def _pixels(self, step: int) -> float:
        """Pixels of the images of the first ``step`` steps, along one of two sides squared."""
        phases, place = self._timeline.phases, self._timeline.position(step)
        ends = [phase.start for phase in phases[1:]] + [place]
        return sum(
            max(0, min(place, end) - phase.start) * phase.image_size**2
            for phase, end in zip(phases, ends, strict=True)
        )
