"""Progress reports and worker threads for long-running work on a data set."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Progress:
    """The progress of a task, or a remark if there is no total.

    Attributes:
        what: Name of the task, such as ``"writing"``, or the text of the remark.
        images: Number of images processed so far.
        bytes: Number of bytes processed so far, of encoded images or of a file.
        total_images: Number of images in all; None if unknown or if the task is not about images.
        total_bytes: Number of bytes in all; None if unknown.
    """

    what: str
    images: int = 0
    bytes: int = 0
    total_images: int | None = None
    total_bytes: int | None = None


#: Called with the progress at the start of each task and after every image or every few megabytes,
#: from one thread at a time. An exception that it raises stops the task.
ProgressCallback = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Ignore the progress: the default callback."""


class _StoppedError(Exception):
    """Raised in worker threads once the task has been stopped."""


class Meter:
    """Sums the progress of several threads and reports it.

    Args:
        report: Callback for the progress.
        what: Name of the task.
        total_images: Number of images in all; None if unknown.
        total_bytes: Number of bytes in all; None if unknown.
    """

    def __init__(
        self,
        report: ProgressCallback,
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
        """Count images and bytes that have just been processed."""
        with self._lock:
            if self._stop.is_set():
                raise _StoppedError
            done = self._progress
            self._progress = replace(done, images=done.images + images, bytes=done.bytes + bytes_)
            self._report(self._progress)

    def in_threads(
        self, function: Callable[[_Task], _Result], tasks: Iterable[_Task], workers: int
    ) -> Iterator[_Result]:
        """Run ``function`` on each task in threads and yield the results in the order of the tasks.

        Only ``2 * workers`` tasks are queued at a time. The first failure stops all other tasks at
        their next :meth:`add` and is raised here.
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

        waiting: deque[Future[_Result]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            try:
                for task in tasks:
                    waiting.append(pool.submit(work, task))
                    if len(waiting) > 2 * workers:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            except BaseException as error:
                self._stop.set()
                if isinstance(error, _StoppedError):
                    raise failures[0] from None
                raise
            finally:
                for future in waiting:
                    future.cancel()


def default_workers() -> int:
    """Return the default number of worker threads: one per core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
