"""Show the progress of work on a data set: a bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from ...pipeline import Progress

_BAR_SECONDS = 0.1
_LINE_SECONDS = 30.0


class Bar:
    """Shows each :class:`Progress` that it is called with.

    Args:
        console: Where to show it; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._bars: Bars | None = None
        if self._console.is_terminal:
            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[done]}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
        self._what = ""
        self._task: TaskID | None = None
        self._began = self._shown = 0.0

    def __enter__(self) -> Bar:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bars:
            self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        if progress.total_images is None and progress.total_bytes is None:
            self._console.print(progress.what, markup=False)  # a remark, not a task
            return
        now = time.monotonic()
        first = progress.what != self._what
        if first:
            self._what, self._began = progress.what, now
        elif now - self._shown < (_BAR_SECONDS if self._bars else _LINE_SECONDS):
            return
        self._shown = now
        text = describe(progress, now - self._began)
        if self._bars is None:
            line = f"{progress.what}: {extent(progress) if first else text}"
            self._console.print(line.removesuffix(": "), markup=False)
            return
        if progress.total_images is not None:
            done, total = progress.images, progress.total_images
        else:
            done, total = progress.bytes, progress.total_bytes or 0
        if first or self._task is None:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task = self._bars.add_task(progress.what, total=total, done=text)
        self._bars.update(self._task, completed=done, done=text)


def describe(progress: Progress, seconds: float) -> str:
    """Images and bytes done, out of how many, and per second."""
    parts = []
    if progress.total_images is not None or progress.images:
        total = "" if progress.total_images is None else f" of {progress.total_images:,}"
        parts.append(f"{progress.images:,}{total} images")
    if progress.total_bytes is not None or progress.bytes:
        total = "" if progress.total_bytes is None else f" of {size(progress.total_bytes)}"
        parts.append(f"{size(progress.bytes)}{total}")
    if seconds > 0:
        if progress.images:
            parts.append(f"{progress.images / seconds:,.0f} images/s")
        if progress.bytes:
            parts.append(f"{size(progress.bytes / seconds)}/s")
    return ", ".join(parts)


def extent(progress: Progress) -> str:
    """The amount of work, as far as it is known."""
    parts = []
    if progress.total_images is not None:
        parts.append(f"{progress.total_images:,} images")
    if progress.total_bytes is not None:
        parts.append(size(progress.total_bytes))
    return ", ".join(parts)


def size(count: float) -> str:
    """A number of bytes with three digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:,.3g} {unit}"
        count /= 1000
    raise AssertionError
