"""The terminal output of a run: progress and metrics."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Output of a run: a progress bar on a terminal, plain lines elsewhere.

    Args:
        shows: Whether this rank shows anything; rank 0 does.
        total_steps: Number of steps that the run makes.
        epochs: Number of epochs that the recipe asks for.
    """

    def __init__(self, *, shows: bool, total_steps: int, epochs: float) -> None:
        self.console = Console(quiet=not shows, highlight=False, soft_wrap=True)
        self._total_steps = total_steps
        self._epochs = epochs
        self._progress: Progress | None = None
        self._task: Any = None
        if shows and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("steps"),
                TimeRemainingColumn(),
                console=self.console,
            )

    def start(self, step: int) -> None:
        """Show the progress bar, with ``step`` steps already made."""
        if self._progress:
            self._task = self._progress.add_task(
                "training", total=self._total_steps, completed=step
            )
            self._progress.start()

    def advance(self) -> None:
        """Advance the progress bar by one step."""
        if self._progress:
            self._progress.advance(self._task)

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        with suppress(OSError):  # a log on a full disk does not end a run
            self.console.print(text, markup=False)

    def metrics(self, split: str, step: int, epoch: float, values: dict[str, float]) -> None:
        """Show new metrics: on the progress bar in training, else on a line of their own."""
        what = f"loss {values['loss']:.3f}  top-1 {values['top1']:.2f} %"
        if split == "train":
            what += f"  lr {values['lr']:.3g}  {values['images_per_second']:,.0f} images/s"
        if "ema_top1" in values:
            what += f"  EMA top-1 {values['ema_top1']:.2f} %"
        if split == "train" and self._progress:
            self._progress.update(
                self._task, description=f"epoch {epoch:.1f} of {self._epochs:g}  {what}"
            )
            return
        self.say(
            f"{split:5}  epoch {epoch:6.2f} of {self._epochs:g}  "
            f"step {step:5d} of {self._total_steps}  {what}"
        )

    def stop(self) -> None:
        """Remove the progress bar."""
        if self._progress:
            self._progress.stop()
