"""Training time between two readings of the meters, without evaluations and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Interval:
    """Stopwatch for the training steps since the meters were last read.

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
