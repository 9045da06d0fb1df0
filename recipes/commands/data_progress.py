"""Show the progress of work on a data set: a bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from ...pipeline import Progress

_LINE_SECONDS = 30.0


class Bar:
    """Shows each :class:`Progress` that it is called with.

    Args:
        console: Where to show it; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[done]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._what, self._began, self._shown = "", 0.0, 0.0

    def __enter__(self) -> Bar:
        self._bars.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        counts_images = progress.total_images is not None
        done = progress.images if counts_images else progress.bytes
        total = progress.total_images if counts_images else progress.total_bytes
        if total is None:
            self._console.print(progress.what, markup=False)  # a remark, not a task
            return
        now, is_new = time.monotonic(), progress.what != self._what
        if is_new:
            self._what, self._began = progress.what, now
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task = self._bars.add_task(progress.what, total=total, done="")
        text = describe(progress, now - self._began)
        assert self._task is not None
        self._bars.update(self._task, completed=done, done=text)
        if self._bars.disable and (is_new or now - self._shown >= _LINE_SECONDS):
            self._shown = now
            self._console.print(f"{progress.what}: {text}", markup=False)


def describe(progress: Progress, seconds: float) -> str:
    """Images and bytes done, out of how many, and images or bytes per second."""
    parts = []
    if progress.total_images is not None:
        parts.append(f"{progress.images:,} of {progress.total_images:,} images")
    if progress.total_bytes is not None:
        parts.append(f"{decimal(progress.bytes)} of {decimal(progress.total_bytes)}")
    if progress.images and seconds > 0:
        parts.append(f"{progress.images / seconds:,.0f} images/s")
    elif progress.bytes and seconds > 0:
        parts.append(f"{decimal(int(progress.bytes / seconds))}/s")
    return ", ".join(parts)
