"""What a run shows while it trains: a progress bar, a line for each reading, and warnings."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from ....pipeline import printable
from ...words import rate, short_duration
from ..callbacks import RunContext
from ..folder.outcome import best, metrics_of
from ..watch.clocks import TimeLeft


class Display:
    """Output of a run: a progress bar on a terminal that can have one, plain lines elsewhere."""

    _run: RunContext
    _time_left: TimeLeft

    def __init__(
        self,
        shows: bool,
        *,
        quiet: bool = False,
        warns: bool = True,
        console: Console | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._shows, self._warns, self._now = shows and not quiet, shows and warns, now
        standard = _Lasting(quiet=not self._shows, highlight=False, soft_wrap=True)
        self.console = console or standard
        self._best: tuple[float, float] | None = None  # top-1 and its epoch
        self._memory: int | None = None
        self.bar: Bar | None = None

    def start(self, run: RunContext) -> None:
        """Begin to show the steps of a run, which has its progress bar from now on."""
        if not self._shows:
            return
        self._run = run
        self._time_left = TimeLeft(run.timeline, run.last_step, self._now)
        if run.job.device.type == "cuda":
            self._memory = torch.cuda.get_device_properties(run.job.device).total_memory
        if so_far := best(metrics_of(run.run_dir).val):
            self._note_best(so_far["top1"], so_far["epoch"])
        if self.console.is_interactive:
            self.bar = Bar(self.console, run.last_step, run.step)
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
        """Show new metrics: on the progress bar in training, else on a line of their own."""
        if not self._shows:
            return
        if split == "train":
            columns = _of_training(values, self._memory)
        else:
            columns = _of_evaluation(values, self._note_best(values["top1"], epoch))
        seconds = self._time_left.seconds(step)
        left = "" if seconds is None else f"left {short_duration(seconds):>6}"
        steps, epochs = str(self._run.last_step), f"{self._run.recipe.epochs:.2f}"
        place = [f"epoch {epoch:{len(epochs)}.2f}", f"step {step:{len(steps)}}"]
        mark = f"slow: {slow}" if slow else ""
        if self.bar:
            self.bar.update(self.bar.task, left=left)
        if self.bar and split == "train":
            self.bar.values = _joined(place[0], mark, *columns)
        else:
            self.say(_joined(f"{split:5}", *place, *columns, left, mark))

    def stop(self) -> None:
        """Stop the progress bar, which stays as it was last."""
        if self.bar:
            self.bar.stop()

    def _note_best(self, top1: float, epoch: float) -> tuple[float, float]:
        if self._best is None or top1 > self._best[0]:
            self._best = top1, epoch
        return self._best


class _Lasting(Console):
    """A console that says nothing more once nobody reads it, where rich's ends the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def _printable(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


# --- the columns of a line, which stay where they are ---------------------------------------


def _joined(*columns: str) -> str:
    return "  ".join(filter(None, columns)).rstrip()


def _scores(values: dict[str, float]) -> list[str]:
    # Where a run stops between two readings, accuracy was not measured.
    top1 = f"{values['top1']:6.2f}%" if "top1" in values else f"{'-':>7}"
    return [f"loss {values['loss']:6.3f}", f"top-1 {top1}"]


def _of_training(values: dict[str, float], total_memory: int | None) -> list[str]:
    return [
        *_scores(values),
        f"lr {values['lr']:<8.3g}",
        f"{rate(values['images_per_second']):>6} images/s",
        f"wait {values['wait_seconds'] / max(values['seconds'], 1e-9):3.0%}",
        _gigabytes(values["memory_bytes"] / 1e9, total_memory),
    ]


def _of_evaluation(values: dict[str, float], best: tuple[float, float]) -> list[str]:
    return [
        *_scores(values),
        f"best {best[0]:6.2f}% at epoch {best[1]:.2f}",
        f"EMA {values['ema_top1']:6.2f}%" if "ema_top1" in values else "",
        f"evaluated in {values['seconds']:.1f} s",
    ]


def _gigabytes(used: float, total: int | None) -> str:
    """Gigabytes in use, out of those that there are, in as many characters at each reading."""
    if total:
        whole = f"{total / 1e9:.0f}"
        return f"{used:{len(whole)}.0f}/{whole} GB"
    return f"{used:4.1f} GB" if used < 99.95 else f"{used:4.0f} GB"


class Bar(Progress):
    """The steps and the time left on one line, the values of the last reading below it."""

    def __init__(self, console: Console, total_steps: int, step: int) -> None:
        self.values = ""
        super().__init__(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[left]}", style="progress.remaining"),
            console=console,
            expand=True,
            # Warnings go above the bar, unless they go to a file.
            redirect_stderr=sys.stderr.isatty(),
        )
        self.task = self.add_task("", total=total_steps, completed=step, left="")

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and the values below it."""
        yield from super().get_renderables()
        if self.values:
            yield Text(self.values, no_wrap=True, overflow="ellipsis")
