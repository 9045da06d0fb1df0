"""Do tasks that depend on each other's results, several at a time."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class TaskPool(ABC, Generic[Task, Result]):
    """Do what is missing, each task as soon as those that it depends on have finished.

    Args:
        deadline: Value of ``time.monotonic()`` after which no task is started.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        self._deadline = deadline
        self._in_progress: list[Task] = []
        self._changed = threading.Condition()

    @abstractmethod
    def missing(self) -> Iterable[Task]:
        """Return the tasks that can be done now, the most urgent first.

        Tasks in progress may be among them. It is called again whenever a task has finished.
        """

    @abstractmethod
    def finish(self, task: Task) -> Result:
        """Do a task; several threads call this."""

    @abstractmethod
    def store(self, task: Task, result: Result) -> None:
        """Keep the result of a task; one thread at a time calls this."""

    def run(self, workers: int) -> None:
        """Do what is missing with this many threads."""
        with ThreadPoolExecutor(workers) as pool:
            for worker in [pool.submit(self.work) for _ in range(workers)]:
                worker.result()

    def work(self) -> None:
        """Do what is missing until nothing is left or time is up; any number of threads may."""
        while (task := self._next()) is not None:
            try:
                result = self.finish(task)
            except BaseException:
                with self._changed:
                    self._deadline = 0.0  # for the other threads too
                    self._end(task)
                raise
            with self._changed:
                self.store(task, result)
                self._end(task)

    def _end(self, task: Task) -> None:
        self._in_progress.remove(task)
        self._changed.notify_all()

    def _next(self) -> Task | None:
        """Return what to do next, waiting while everything depends on what is in progress."""
        with self._changed:
            while time.monotonic() < self._deadline:
                task = next((t for t in self.missing() if t not in self._in_progress), None)
                if task is not None:
                    self._in_progress.append(task)
                    return task
                if not self._in_progress:
                    break
                self._changed.wait()
            return None
