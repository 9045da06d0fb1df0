"""How long training took since the meters were last read, without what else is done in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Interval:
    """Training time since the meters were last read."""

    def __init__(self, wait_seconds: float) -> None:
        self._start = time.perf_counter()
        self._wait_start = wait_seconds

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def wait_seconds(self, now: float) -> float:
        return now - self._wait_start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what runs inside."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start
