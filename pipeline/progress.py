"""How far long work on a data set has come, told to whoever asked, and threads that do it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Progress:
    """How far a piece of work has come.

    Attributes:
        what: it is, such as ``"writing"``.
        images: done.
        bytes: done, of encoded images or of a file.
        total_images: None where it is not known, or the work is not on images.
        total_bytes: None where it is not known.
    """

    what: str
    images: int = 0
    bytes: int = 0
    total_images: int | None = None
    total_bytes: int | None = None


#: Is told of progress: at the start of each piece of work, after every image or few megabytes, and
#: from one thread at a time. What it raises stops the work.
Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Tell nobody."""


class _StoppedError(Exception):
    """Raised in threads whose work is no longer wanted."""


class Meter:
    """Adds up what threads have done.

    Args:
        report: is told.
        what: the work is.
        total_images: None where it is not known.
        total_bytes: None where it is not known.
    """

    def __init__(
        self,
        report: Report,
        what: str,
        total_images: int | None = None,
        total_bytes: int | None = None,
    ) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._progress = Progress(what, 0, 0, total_images, total_bytes)
        report(self._progress)

    def add(self, images: int, bytes_: int) -> None:
        """So much more is done."""
        with self._lock:
            if self._stop.is_set():
                raise _StoppedError
            done = self._progress
            self._progress = replace(done, images=done.images + images, bytes=done.bytes + bytes_)
            self._report(self._progress)

    def in_threads(
        self, function: Callable[[_Task], _Result], tasks: Iterable[_Task], workers: int
    ) -> Iterator[_Result]:
        """Results in the order of the tasks, of which few are under way at once.

        The first failure stops all the others at their next :meth:`add`, and is raised here.
        """
        failures: list[BaseException] = []

        def work(task: _Task) -> _Result:
            try:
                if self._stop.is_set():
                    raise _StoppedError
                return function(task)
            except BaseException as error:
                if not isinstance(error, _StoppedError):
                    failures.append(error)
                self._stop.set()
                raise

        with ThreadPoolExecutor(workers) as pool:
            try:
                yield from in_order(pool, work, tasks, 2 * workers)
            except BaseException as error:
                self._stop.set()
                if isinstance(error, _StoppedError):
                    raise failures[0] from None
                raise


def in_order(
    pool: Executor, function: Callable[[_Task], _Result], tasks: Iterable[_Task], ahead: int
) -> Iterator[_Result]:
    """Results in the order of the tasks, of which ``ahead`` at most are handed to the pool."""
    waiting: deque[Future[_Result]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(function, task))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def default_workers() -> int:
    """Threads for work that reads, decodes and writes: one per core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
