"""The terminal output of a run: progress, metrics, and a table of results at the end."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


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

    def results(self, summary: dict[str, Any], run_dir: Path, report: Path) -> None:
        """Show the table of results, advice about the input, and where the files are."""
        table = Table(title=f"{summary['recipe']}, seed {summary['seed']}", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        if "top1" in summary:
            table.add_row("top-1", f"{summary['top1']:.2f} %")
            table.add_row("top-5", f"{summary['top5']:.2f} %")
            table.add_row(
                "best top-1", f"{summary['best_top1']:.2f} % at epoch {summary['best_epoch']:.1f}"
            )
        if "ema_top1" in summary:
            table.add_row("EMA top-1", f"{summary['ema_top1']:.2f} %")
        table.add_row("epochs", f"{summary['epoch']:.1f}")
        table.add_row("steps", f"{summary['step']:,}")
        table.add_row("training time", f"{summary['train_seconds']:,.1f} s")
        table.add_row("throughput", f"{summary['images_per_second']:,.0f} images/s")
        for name, share in (("", "wait_share"), (" after the first step", "steady_wait_share")):
            table.add_row(f"waiting for data{name}", f"{100 * summary[share]:.1f} % of the time")
        if summary.get("skipped_images"):
            table.add_row("images skipped", f"{summary['skipped_images']:,}")
        with suppress(OSError):
            self.console.print(table)
        if summary.get("input_advice"):
            stages, *hints = summary["input_advice"]
            self.say(f"training waited for data: {stages}")
            for hint in hints:
                self.say(f"  suggestion: {hint}")
        self.say(f"run folder: {run_dir}")
        self.say(f"report:     {report}")
