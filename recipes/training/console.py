"""The terminal output of a run: a progress bar, a line for each reading, and warnings."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

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

from ...pipeline import Loader, printable
from ..ranks import Job
from ..schema.recipe import Recipe
from . import reading_line as columns
from .folder.outcome import best, metrics_of
from .reading_line import Part, joined
from .time_left import TimeLeft, short_duration
from .timeline import Timeline
from .usage import capacity_of


class Display:
    """Output of a run: a progress bar on a terminal that can have one, plain lines elsewhere.

    What to take for a terminal, and its colours, is decided by rich: NO_COLOR, FORCE_COLOR,
    TTY_COMPATIBLE and TTY_INTERACTIVE apply.

    Args:
        shows: Whether this rank shows anything; rank 0 does.
        total_steps: Number of steps that the run makes.
        epochs: Number of epochs that the recipe asks for.
        time_left: Estimates the time left; is told what is shown.
        quiet: Whether to show nothing but warnings.
        warns: Whether to show warnings.
        total_memory: Memory of the device, in bytes, if it has a limit of its own.
    """

    def __init__(
        self,
        *,
        shows: bool,
        total_steps: int,
        epochs: float,
        time_left: TimeLeft,
        quiet: bool = False,
        warns: bool = True,
        total_memory: int | None = None,
    ) -> None:
        self._shows, self._warns = shows and not quiet, shows and warns
        self.console = Console(quiet=not self._shows, highlight=False, soft_wrap=True)
        self._total_steps, self._epochs = total_steps, epochs
        self._time_left, self._total_memory = time_left, total_memory
        self._best: tuple[float, float] | None = None  # top-1 and its epoch
        self._bar: _Bar | None = None
        if self._shows and self.console.is_interactive:
            self._bar = _Bar(self.console, total_steps)

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        job: Job,
        timeline: Timeline,
        val_loader: Loader | None,
        step: int,
        *,
        quiet: bool = False,
        warns: bool = True,
    ) -> Display:
        """Return the display of a run that begins after ``step`` steps."""
        val_images = len(val_loader.source) if val_loader else 0
        capacity = capacity_of(job.device)
        return cls(
            shows=job.is_main,
            total_steps=timeline.last_step(recipe),
            epochs=recipe.epochs,
            time_left=TimeLeft(recipe, timeline, val_images, step),
            quiet=quiet,
            warns=warns,
            total_memory=capacity.bytes if capacity else None,
        )

    def start(self, step: int, run_dir: Path) -> None:
        """Show the progress bar, with ``step`` steps already made, of a run in ``run_dir``."""
        if not self._shows:
            return
        if so_far := best(metrics_of(run_dir).val):
            self._note_best(so_far["top1"], so_far["epoch"])
        if self._bar:
            self._bar.begin(step)

    def advance(self) -> None:
        """Advance the progress bar by one step."""
        if self._bar:
            self._bar.advance(self._bar.task)

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
        seconds, of_training = values["seconds"], split == "train"
        if of_training:
            self._time_left.trained(step, values["images_per_second"] * seconds, seconds)
            parts = columns.of_training(values, self._total_memory)
        else:
            self._time_left.evaluated(step, seconds)
            best = self._note_best(values["top1"], epoch)
            parts = columns.of_evaluation(values, best)
        left = self._time_left.seconds(step)
        where = columns.place(split, step, self._total_steps, epoch, self._epochs)
        if self._bar:
            self._bar.leave(left)
        line = [*where, *parts]
        if self._bar and of_training:
            self._bar.values = [where[1], *parts, *columns.holding_up(slow)]
        elif self._bar:  # which has the time left
            self.say(joined(line, self.console.width))
        else:
            self.say(joined([*line, *columns.time_left(left), *columns.holding_up(slow)]))
        if told := self._time_left.announcement(step, time.time()):
            self.say(told)

    def saved(self, step: int, seconds: float) -> None:
        """Note that a checkpoint of ``step`` took some time."""
        self._time_left.saved(step, seconds)

    def stop(self) -> None:
        """Stop the progress bar, which stays as it was last."""
        if self._bar:
            self._bar.stop()

    def _note_best(self, top1: float, epoch: float) -> tuple[float, float]:
        if self._best is None or top1 > self._best[0]:
            self._best = top1, epoch
        return self._best


def _printable(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


class _Bar(Progress):
    """The steps and the time left on one line, the values of the last reading below it.

    Attributes:
        values: The values, as columns of a line.
    """

    def __init__(self, console: Console, total_steps: int) -> None:
        self.values: list[Part] = []
        self._left: float | None = None
        self._at = 0.0  # when it was told
        super().__init__(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            _TimeLeftColumn(self),
            console=console,
            expand=True,
            # Warnings go above the bar, unless they go to a file.
            redirect_stderr=sys.stderr.isatty(),
        )
        self.task = self.add_task("", total=total_steps)

    def begin(self, step: int) -> None:
        """Show the bar, with ``step`` steps made."""
        self.update(self.task, completed=step)
        self.start()

    def leave(self, seconds: float | None) -> None:
        """Set the time that is left from now."""
        self._left, self._at = seconds, time.monotonic()

    @property
    def left(self) -> str:
        """The time left now."""
        if self._left is None:
            return ""
        return f"left {short_duration(max(0.0, self._left - (time.monotonic() - self._at)))}"

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and the values that fit into the width of the terminal."""
        yield from super().get_renderables()
        if self.values:
            yield Text(joined(self.values, self.console.width), no_wrap=True)


class _TimeLeftColumn(ProgressColumn):
    """The time left, which runs down between two readings."""

    def __init__(self, bar: _Bar) -> None:
        self._bar = bar
        super().__init__(table_column=Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        """Render the time left."""
        return Text(self._bar.left, style="progress.remaining")
