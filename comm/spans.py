"""Names of all-reduces for profilers: as ranges of the thread that works, and as spans of time.

A range of torch.profiler lies on one thread and must close before the one around it. It therefore
holds what a thread does for an all-reduce, such as a sum in memory, and on a GPU the kernels that
it launches. An all-reduce on gloo runs on while its thread turns to another, so from its start to
its end it is a :class:`Span`, measured by the clock of the host. Both cost a look at two variables
unless something records them.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function


class Span(NamedTuple):
    """What happened from one time to another.

    Attributes:
        name: What it was.
        lane: The row of a picture that it belongs to.
        start_ns: When it began, in nanoseconds of Unix time.
        end_ns: When it ended, in nanoseconds of Unix time.
    """

    name: str
    lane: str
    start_ns: int
    end_ns: int


#: The spans of the present recording; None while nothing records.
_spans: list[Span] | None = None


def start_spans() -> None:
    """Record the spans of this process from here on."""
    global _spans
    _spans = []


def stop_spans() -> list[Span]:
    """Record no longer, and return the spans that have ended, in the order of their ends."""
    global _spans
    found, _spans = _spans or [], None
    return found


def spans_are_recorded() -> bool:
    """Whether spans are recorded at present."""
    return _spans is not None


def add_span(name: str, lane: str, start_ns: int, end_ns: int) -> None:
    """Record a span that has ended, from any thread; does nothing while nothing records."""
    spans = _spans  # which another thread may take away
    if spans is not None:
        spans.append(Span(name, lane, start_ns, end_ns))


class OpenSpan:
    """A span that has begun.

    Args:
        name: As in :class:`Span`.
        lane: As in :class:`Span`.
    """

    def __init__(self, name: str, lane: str) -> None:
        self._name, self._lane, self._start = name, lane, time.time_ns()

    def end(self, _: object = None) -> None:
        """Record the span, as ending now; the argument lets it be the callback of a future."""
        add_span(self._name, self._lane, self._start, time.time_ns())


def begin_span(name: str, lane: str) -> OpenSpan | None:
    """Begin a span; None while nothing records."""
    return None if _spans is None else OpenSpan(name, lane)


def is_profiled() -> bool:
    """Whether torch.profiler is active in this process, on whatever thread it was started.

    torch's own code reads the same variable for that.
    """
    return bool(autograd_profiler._is_profiler_enabled)


def ranged(name: str) -> AbstractContextManager[Any]:
    """Context manager that names its body for torch.profiler, if that is active."""
    return record_function(name) if is_profiled() else nullcontext()


def all_reduce_name(bucket: int, size_bytes: int, algorithm: str) -> str:
    """Name the all-reduce of a bucket: ``all-reduce bucket 3, 25.0 MiB, hierarchical``."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"all-reduce bucket {bucket}, {size_bytes / size:.1f} {unit}, {algorithm}"
    return f"all-reduce bucket {bucket}, {size_bytes} bytes, {algorithm}"
