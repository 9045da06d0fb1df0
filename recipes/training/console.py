"""What a run shows while it trains and when it is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class Display:
    """A progress bar on a terminal, plain lines elsewhere, nothing on ranks that do not lead."""

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
        """Show that training goes on from ``step``."""
        if self._progress:
            self._task = self._progress.add_task(
                "training", total=self._total_steps, completed=step
            )
            self._progress.start()

    def advance(self) -> None:
        """One step more."""
        if self._progress:
            self._progress.advance(self._task)

    def say(self, text: str) -> None:
        """A line of its own."""
        self.console.print(text, markup=False)

    def metrics(self, split: str, step: int, epoch: float, values: dict[str, float]) -> None:
        """What was just measured: on the bar in training, as a line otherwise."""
        what = f"loss {values['loss']:.3f}  top-1 {values['top1']:.2f} %"
        if split == "train":
            what += f"  lr {values['lr']:.3g}  {values['images_per_second']:,.0f} images/s"
        if "ema_top1" in values:
            what += f"  of averaged weights {values['ema_top1']:.2f} %"
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
        """Take the bar away."""
        if self._progress:
            self._progress.stop()

    def results(self, summary: dict[str, Any], run_dir: Path, report: Path) -> None:
        """The table at the end."""
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
            table.add_row("top-1 of averaged weights", f"{summary['ema_top1']:.2f} %")
        table.add_row("epochs", f"{summary['epoch']:.1f}")
        table.add_row("steps", f"{summary['step']:,}")
        table.add_row("training time", f"{summary['train_seconds']:,.1f} s")
        table.add_row("throughput", f"{summary['images_per_second']:,.0f} images/s")
        table.add_row("input-bound", f"{100 * summary['wait_share']:.1f} % of the time")
        if summary.get("skipped_images"):
            table.add_row("images skipped", f"{summary['skipped_images']:,}")
        self.console.print(table)
        if summary.get("input_advice"):
            stages, *hints = summary["input_advice"]
            self.say(f"training waited for its data: {stages}")
            for hint in hints:
                self.say(f"  would help: {hint}")
        self.say(f"run folder: {run_dir}")
        self.say(f"report:     {report}")
