"""Clocks of a run: stopwatches for parts of a step, and the time between two readings.

A GPU computes later than the host launches. Its times are taken by events on the stream that is
current, which the host reads when they have long passed: nothing waits for the device before the
sums are read.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

#: Pairs of events that are kept before those that have passed are added up, to bound their number
#: where the meters are read once an epoch.
KEPT = 512


class Stopwatch(Protocol):
    """Sums times by name."""

    def now(self) -> Any:
        """Return the present point in time, in the order of the device's work."""

    def add(
        self, name: str, start: Any, end: Any, *, at_most: float = math.inf, beyond: str = ""
    ) -> float | None:
        """Add the time between two points, which must not be used again.

        Args:
            name: What to add it to.
            start: The first point.
            end: The second point.
            at_most: Most seconds of it to add to that.
            beyond: What to add the others to.

        Returns:
            The seconds between them, if they are known already.
        """

    def totals(self) -> dict[str, float]:
        """Return the seconds of each name since the start; waits for the device."""


class HostStopwatch:
    """Measures by the clock of the host.

    Args:
        clock: Seconds since any time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock
        self._totals: dict[str, float] = defaultdict(float)

    def add(
        self, name: str, start: float, end: float, *, at_most: float = math.inf, beyond: str = ""
    ) -> float:
        _divide(self._totals, end - start, name, at_most, beyond)
        return end - start

    def totals(self) -> dict[str, float]:
        return dict(self._totals)


class DeviceStopwatch:
    """Measures by CUDA events on the current stream, which are used again after their reading.

    Args:
        new_event: Makes an event.
    """

    def __init__(
        self, new_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)
    ) -> None:
        self._new_event = new_event
        self._free: list[Any] = []
        self._pending: deque[tuple[Any, Any, str, float, str]] = deque()
        self._totals: dict[str, float] = defaultdict(float)

    def now(self) -> Any:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def add(
        self, name: str, start: Any, end: Any, *, at_most: float = math.inf, beyond: str = ""
    ) -> None:
        self._pending.append((start, end, name, at_most, beyond))
        if len(self._pending) > KEPT:
            while self._pending and self._pending[0][1].query():  # which does not wait
                self._add_first()

    def totals(self) -> dict[str, float]:
        while self._pending:
            self._pending[0][1].synchronize()
            self._add_first()
        return dict(self._totals)

    def _add_first(self) -> None:
        start, end, name, at_most, beyond = self._pending.popleft()
        _divide(self._totals, start.elapsed_time(end) / 1000, name, at_most, beyond)
        self._free += [start, end]


def _divide(
    totals: dict[str, float], seconds: float, name: str, at_most: float, beyond: str
) -> None:
    """Add up to ``at_most`` seconds to a name, and the others to another."""
    totals[name] += min(seconds, at_most)
    if seconds > at_most:
        totals[beyond] += seconds - at_most


def stopwatch_of(device: torch.device) -> Stopwatch:
    """Return a stopwatch for the work of a device."""
    return DeviceStopwatch() if device.type == "cuda" else HostStopwatch()


class Interval:
    """Time of the training steps since the meters were last read, without what pauses it.

    Args:
        wait_seconds: The loader's total waiting time at the start.

    Attributes:
        waits: Seconds that each step waited for its data.
    """

    def __init__(self, wait_seconds: float) -> None:
        self._start = time.perf_counter()
        self._waited = wait_seconds
        self.waits: list[float] = []

    def seconds(self) -> float:
        """Return the seconds since the start, without pauses."""
        return time.perf_counter() - self._start

    def step(self, wait_seconds: float) -> None:
        """Record a step; ``wait_seconds`` is the loader's total waiting time after it."""
        self.waits.append(wait_seconds - self._waited)
        self._waited = wait_seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager whose body is left out of the time."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start
