"""Metrics for TensorBoard, in the folder ``tensorboard`` of the run.

Scalars are named ``train/loss``, ``val/top1`` and so on, by step. A resumed run continues in the
same folder and hides the values of the steps that it repeats (``purge_step``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ...ranks import Job
from ...schema.recipe import Recipe
from ..callbacks import Callback, Metrics, RunContext, Status
from .packages import check_installed


class TensorBoard(Callback):
    """Writes scalars, and histograms of trust ratios, as TensorBoard event files."""

    def check(self, recipe: Recipe, run_dir: Path, job: Job) -> None:
        check_installed("tensorboard", "recipes", job)

    def on_start(self, run: RunContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = run.step + 1 if run.step else None
        self._writer: Any = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=purge_step)

    def on_log(self, metrics: Metrics) -> None:
        for name, value in metrics.values.items():
            self._writer.add_scalar(f"{metrics.split}/{name}", value, metrics.step)

    def on_histograms(self, name: str, step: int, epoch: float, values: dict[str, Tensor]) -> None:
        for layer, of_layer in values.items():
            self._writer.add_histogram(f"{name}/{layer}", of_layer, step)

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        self._writer.close()
