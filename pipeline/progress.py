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
    """The progress of a task, or a remark if there is no total."""

    what: str  #: Name of the task, such as ``"writing"``, or the text of the remark.
    images: int = 0  #: Number of images processed so far.
    bytes: int = 0  #: Number of bytes processed so far, of encoded images or of a file.
    total_images: int | None = None  #: None if unknown, or if the task is not about images.
    total_bytes: int | None = None  #: None if unknown.


#: Called with the progress at the start of each task and after every image or every few megabytes,
#: from one thread at a time. An exception that it raises stops the task.
ProgressCallback = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Ignore the progress: the default callback."""


class Meter:
    """Sums the progress of several threads and reports it, as :class:`Progress` has it."""

    def __init__(
        self,
        report: ProgressCallback,
        what: str,
        total_images: int | None = None,
        total_bytes: int | None = None,
    ) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._progress = Progress(what, 0, 0, total_images, total_bytes)
        report(self._progress)

    def add(self, images: int, bytes_: int) -> None:
        """Count images and bytes that have just been processed."""
        with self._lock:
            if self._failure:
                raise self._failure
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

        def work(task: _Task) -> _Result:
            if self._failure:
                raise self._failure
            try:
                return function(task)
            except BaseException as error:
                self._failure = self._failure or error
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
                self._failure = self._failure or error
                raise
            finally:
                for future in waiting:
                    future.cancel()


def default_workers() -> int:
    """Return the default number of worker threads: one per core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
