"""What a run shows while it trains: a progress bar, a line for each reading, and warnings."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from ....pipeline import printable
from ...words import rate, short_duration
from ..callbacks import RunContext
from ..folder.outcome import best, metrics_of
from ..watch.time_left import TimeLeft
from ..watch.usage import capacity_of


class Display:
    """Output of a run: a progress bar on a terminal that can have one, plain lines elsewhere.

    What to take for a terminal, and its colours, is decided by rich: NO_COLOR, FORCE_COLOR,
    TTY_COMPATIBLE and TTY_INTERACTIVE apply.

    Args:
        shows: Whether this rank shows anything; rank 0 does.
        quiet: Whether to show nothing but warnings.
        warns: Whether to show warnings.
        console: Where lines go; by default standard output.
        clock: Returns the present time, in seconds since 1970.
    """

    _run: RunContext
    _time_left: TimeLeft

    def __init__(
        self,
        shows: bool,
        *,
        quiet: bool = False,
        warns: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shows, self._warns, self._clock = shows and not quiet, shows and warns, clock
        standard = Console(quiet=not self._shows, highlight=False, soft_wrap=True)
        self.console = console or standard
        self._best: tuple[float, float] | None = None  # top-1 and its epoch
        self._memory: int | None = None
        self.bar: Bar | None = None

    def start(self, run: RunContext) -> None:
        """Begin to show the steps of a run, which has its progress bar from now on."""
        if not self._shows:
            return
        self._run, self._time_left = run, TimeLeft(run)
        capacity = capacity_of(run.job.device)
        self._memory = capacity.bytes if capacity else None
        if so_far := best(metrics_of(run.run_dir).val):
            self._note_best(so_far["top1"], so_far["epoch"])
        if self.console.is_interactive:
            self.bar = Bar(self.console, run.last_step, run.step, self._clock)
            self.bar.start()

    def advance(self) -> None:
        """Advance the progress bar by one step."""
        if self.bar:
            self.bar.advance(self.bar.task)

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        with suppress(OSError):  # a log on a full disk does not end a run
            self.console.print(_printable(text), markup=False)

    def warn(self, text: str) -> None:
        """Print a warning to standard error, above the progress bar if there is one."""
        if self._warns:
            with suppress(OSError):
                print(f"largebatch: warning: {_printable(text)}", file=sys.stderr, flush=True)

    def metrics(
        self, split: str, step: int, epoch: float, values: dict[str, float], slow: str = ""
    ) -> None:
        """Show new metrics: on the progress bar in training, else on a line of their own.

        Args:
            split: ``train`` or ``val``.
            step: Number of steps made.
            epoch: Epochs of images read.
            values: The metrics.
            slow: The ranks that hold the others up, in short; empty if there are none.
        """
        if not self._shows:
            return
        if split == "train":
            seconds = values["seconds"]
            self._time_left.trained(step, values["images_per_second"] * seconds, seconds)
            columns = [*_scores(values), *_of_training(values, self._memory)]
        else:
            self._time_left.evaluated(step, values["seconds"])
            so_far = self._note_best(values["top1"], epoch)
            columns = [*_scores(values), *_of_evaluation(values, so_far)]
        left = self._time_left.seconds(step)
        steps, epochs = str(self._run.last_step), f"{self._run.recipe.epochs:.2f}"
        line = [
            _Column(f"{split:5}", _FIRST),
            _Column(f"epoch {epoch:{len(epochs)}.2f}", 4),
            _Column(f"step {step:{len(steps)}}", 2),
            *columns,
        ]
        slow_columns = [_Column(f"slow: {slow}", 7)] if slow else []
        if self.bar:  # which has the time left
            self.bar.leave(left)
            if split == "train":
                self.bar.values = [line[1], *columns, *slow_columns]
            else:
                self.say(joined(line, self.console.width))
        else:
            left_column = [] if left is None else [_Column(f"left {short_duration(left):>6}", 5)]
            self.say(joined([*line, *left_column, *slow_columns]))
        if told := self._time_left.announcement(step, self._clock()):
            self.say(told)

    def saved(self, step: int, seconds: float) -> None:
        """Note that a checkpoint of ``step`` took some time."""
        if self._shows:
            self._time_left.saved(step, seconds)

    def stop(self) -> None:
        """Stop the progress bar, which stays as it was last."""
        if self.bar:
            self.bar.stop()

    def _note_best(self, top1: float, epoch: float) -> tuple[float, float]:
        if self._best is None or top1 > self._best[0]:
            self._best = top1, epoch
        return self._best


def _printable(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


# --- the columns of a line, which stay where they are ---------------------------------------


class _Column(NamedTuple):
    """A column of a line.

    Attributes:
        text: What it shows.
        importance: Which columns go first where there is no room for all: those of the lowest.
    """

    text: str
    importance: int


#: Importance of the columns that stay longest.
_FIRST = 9


def _scores(values: dict[str, float]) -> list[_Column]:
    # Where a run stops between two readings, accuracy was not measured.
    top1 = f"{values['top1']:6.2f}%" if "top1" in values else f"{'-':>7}"
    return [_Column(f"loss {values['loss']:6.3f}", _FIRST), _Column(f"top-1 {top1}", 8)]


def _of_training(values: dict[str, float], total_memory: int | None) -> list[_Column]:
    columns = [
        _Column(f"lr {values['lr']:<8.3g}", 4),
        _Column(f"{rate(values['images_per_second']):>6} images/s", 6),
        _Column(f"wait {values['wait_seconds'] / max(values['seconds'], 1e-9):3.0%}", 3),
    ]
    if "memory_bytes" in values:
        columns.append(_Column(_gigabytes(values["memory_bytes"] / 1e9, total_memory), 1))
    return columns


def _of_evaluation(values: dict[str, float], best: tuple[float, float]) -> list[_Column]:
    columns = [_Column(f"best {best[0]:6.2f}% at epoch {best[1]:.2f}", 5)]
    if "ema_top1" in values:
        columns.append(_Column(f"EMA {values['ema_top1']:6.2f}%", 6))
    return [*columns, _Column(f"evaluated in {values['seconds']:.1f} s", 1)]


def _gigabytes(used: float, total: int | None) -> str:
    """Gigabytes in use, out of those that there are, in as many characters at each reading."""
    if total:
        whole = f"{total / 1e9:.0f}"
        return f"{used:{len(whole)}.0f}/{whole} GB"
    return f"{used:4.1f} GB" if used < 99.95 else f"{used:4.0f} GB"


def joined(columns: Sequence[_Column], width: int | None = None) -> str:
    """Join columns to a line.

    Args:
        columns: The columns.
        width: The most characters that it may have; None: any number. Columns are left out where
            they find no room beside those that are more important; the others keep their order.
    """
    kept: set[int] = set()
    for number in sorted(range(len(columns)), key=lambda number: -columns[number].importance):
        if width is None or len(_line(columns, kept | {number})) <= width:
            kept.add(number)
    return _line(columns, kept)


def _line(columns: Sequence[_Column], kept: set[int]) -> str:
    return "  ".join(column.text for n, column in enumerate(columns) if n in kept).rstrip()


class Bar(Progress):
    """The steps and the time left on one line, the values of the last reading below it.

    Attributes:
        values: The values, as columns of a line.
    """

    def __init__(
        self, console: Console, total_steps: int, step: int, clock: Callable[[], float]
    ) -> None:
        self.values: list[_Column] = []
        self._end: float | None = None  # when the run ends, as far as that is known
        super().__init__(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            _TimeLeftColumn(self),
            console=console,
            expand=True,
            get_time=clock,
            # Warnings go above the bar, unless they go to a file.
            redirect_stderr=sys.stderr.isatty(),
        )
        self.task = self.add_task("", total=total_steps, completed=step)

    def leave(self, seconds: float | None) -> None:
        """Set the time that is left from now; None: it is not known."""
        self._end = None if seconds is None else self.get_time() + seconds

    @property
    def left(self) -> str:
        """The time left now, which runs down between two readings."""
        if self._end is None:
            return ""
        return f"left {short_duration(max(0.0, self._end - self.get_time()))}"

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and the values that fit into the width of the terminal."""
        yield from super().get_renderables()
        if self.values:
            yield Text(joined(self.values, self.console.width), no_wrap=True)


class _TimeLeftColumn(ProgressColumn):
    """The time left, which is rendered anew each time."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        super().__init__(table_column=Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        """Render the time left."""
        return Text(self._bar.left, style="progress.remaining")
