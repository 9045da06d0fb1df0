"""Weights & Biases (https://docs.wandb.ai). WANDB_PROJECT and its other variables apply.

WANDB_MODE=offline keeps everything in the run folder until ``wandb sync``.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from ....errors import RecipeError
from ...callbacks import Metrics, RunContext, Status
from . import Tracker, named


class WandB(Tracker):
    """Logs the recipe as config, metrics, histograms of trust ratios and the summary."""

    package = extra = "wandb"

    def on_start(self, run: RunContext) -> None:
        import wandb

        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "largebatch",
                name=os.environ.get("WANDB_NAME") or f"{run.name}/{run.run_dir.name}",
                id=self.id if run.continues else None,
                resume="allow",
                dir=str(run.run_dir),
                config=run.recipe.model_dump(mode="json", by_alias=True),
                settings=wandb.Settings(console="off"),
            )
        except (wandb.errors.Error, OSError) as error:
            raise RecipeError(
                f"track: wandb cannot start: {error}; valid: log in with `wandb login`, or set "
                "WANDB_MODE=offline"
            ) from error
        self.id = self._run.id
        # W&B's own step only grows, while a resumed run repeats steps, with the same values.
        self._run.define_metric("*", step_metric="step")

    def on_log(self, metrics: Metrics) -> None:
        self._run.log({"step": metrics.step, **named(metrics)})

    def on_histograms(self, name: str, step: int, epoch: float, values: dict[str, Tensor]) -> None:
        from wandb import Histogram

        found = {f"{name}/{layer}": Histogram(v.tolist()) for layer, v in values.items()}
        self._run.log({"step": step, "epoch": epoch, **found})

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        self._run.summary.update(summary)
        if status == "stopped":
            self._run.mark_preempting()  # shown as preempted until it is resumed
        self._run.finish(exit_code=0 if status == "finished" else 1)
