"""Metrics for Weights & Biases (https://docs.wandb.ai).

The recipe is the run's config. Metrics are named ``train/loss``, ``val/top1`` and so on, against
their own ``step``: W&B's internal step only grows, while a run that is resumed from a checkpoint
repeats some steps, with the same values. The run's id is kept in checkpoints, so that a resumed
run continues under it.

W&B's environment variables apply: WANDB_PROJECT (default here: largebatch), WANDB_ENTITY,
WANDB_NAME, and WANDB_MODE=offline, which keeps everything in the run folder until ``wandb sync``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import RecipeError
from ...ranks import Job
from ...schema.recipe import Recipe
from ..callbacks import Callback, Metrics, RunContext, Status
from .names import named
from .packages import check_installed


class WandB(Callback):
    """Logs config, metrics, histograms of trust ratios and the summary to Weights & Biases."""

    def __init__(self) -> None:
        self._id: str | None = None

    def check(self, recipe: Recipe, run_dir: Path, job: Job) -> None:
        check_installed("wandb", "wandb", job)

    def on_start(self, run: RunContext) -> None:
        import wandb

        name = os.environ.get("WANDB_NAME") or f"{run.name}/{run.run_dir.name}"
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "largebatch",
                name=name,
                id=self._id if run.continues else None,
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
        self._id = self._run.id
        self._run.define_metric("*", step_metric="step")

    def on_log(self, metrics: Metrics) -> None:
        self._run.log({"step": metrics.step, **named(metrics)})

    def on_histograms(self, name: str, step: int, epoch: float, values: dict[str, Tensor]) -> None:
        from wandb import Histogram

        found = {f"{name}/{layer}": Histogram(v.tolist()) for layer, v in values.items()}
        self._run.log({"step": step, "epoch": epoch, **found})

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        plain = (int, float, str)
        self._run.summary.update({k: v for k, v in summary.items() if isinstance(v, plain)})
        if status == "stopped":
            self._run.mark_preempting()  # shown as preempted until it is resumed
        self._run.finish(exit_code=0 if status == "finished" else 1)

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._id = state["id"]
