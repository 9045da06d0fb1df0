"""How long training took since the meters were last read, without what else is done in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Interval:
    """Training time since the meters were last read.

    Args:
        wait_seconds: how long the loader has made training wait before it.

    Attributes:
        waits: seconds that each step waited for its data.
    """

    def __init__(self, wait_seconds: float) -> None:
        self._start = time.perf_counter()
        self._waited = wait_seconds
        self.waits: list[float] = []

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def step(self, wait_seconds: float) -> None:
        """A step was made; ``wait_seconds`` is how long the loader has made training wait."""
        self.waits.append(wait_seconds - self._waited)
        self._waited = wait_seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what runs inside."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start
