"""Experiment trackers, each in a few lines on its own package: what they have in common."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ....errors import RecipeError
from ....ranks import Job
from ....schema.recipe import Recipe
from ...callbacks import Callback, Metrics


class Tracker(Callback):
    """A callback on a package that is needed only if a recipe names the tracker.

    Attributes:
        package: Name under which the package is imported.
        extra: Extra of largebatch that installs it.
        id: The tracker's own id of the run, if it has any. Checkpoints keep it, so that a resumed
            run continues under it.
    """

    package: str
    extra: str
    id: str | None = None

    def check(self, recipe: Recipe, run_dir: Path, job: Job) -> None:
        if job.is_main and importlib.util.find_spec(self.package) is None:
            raise RecipeError(
                f"track: {self.package} is not installed; valid: pip install "
                f"'largebatch[{self.extra}]', or track without {self.package}"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.id} if self.id else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.id = state["id"]


def named(metrics: Metrics) -> dict[str, float]:
    """Return metrics under the names of trackers: ``epoch``, ``train/loss``, ``val/top1``, ..."""
    values = {f"{metrics.split}/{name}": value for name, value in metrics.values.items()}
    return {"epoch": metrics.epoch, **values}
