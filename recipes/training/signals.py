"""Signals that stop a run after its current step instead of at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted(*signals: signal.Signals, note: Callable[[int], None]) -> Iterator[None]:
    """Context manager in which ``signals`` only call ``note`` with their number."""

    def handle(number: int, frame: FrameType | None) -> None:
        note(number)

    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
