"""Metrics for MLflow (https://mlflow.org/docs/latest).

The recipe's keys are the run's parameters, such as ``optimizer.lr``, as they were when the run was
first started, because MLflow does not change parameters. Metrics are named ``train/loss``,
``val/top1`` and so on, by step. The run's id is kept in checkpoints, so that a resumed run
continues under it.

MLFLOW_TRACKING_URI names the server and MLFLOW_EXPERIMENT_NAME the experiment (default here:
largebatch). Without a server, everything goes into ``mlflow.db`` in the run folder, an SQLite
database, which ``mlflow ui --backend-store-uri sqlite:///RUN_DIR/mlflow.db`` shows.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from ...errors import RecipeError
from ...ranks import Job
from ...schema.recipe import Recipe
from ..callbacks import Callback, Metrics, RunContext, Status
from .names import named
from .packages import check_installed

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "diverged": "FAILED", "failed": "FAILED"}


class MLflow(Callback):
    """Logs parameters, metrics and the summary to MLflow.

    Metrics are sent in the background, and values that are not finite are left out. Histograms of
    trust ratios are not sent, as MLflow has none. A server that cannot be reached once the run has
    started does not end the run.
    """

    def __init__(self) -> None:
        self._id: str | None = None
        self._newest: Any = None  # the last request sent in the background

    def check(self, recipe: Recipe, run_dir: Path, job: Job) -> None:
        check_installed("mlflow", "mlflow", job)

    def on_start(self, run: RunContext) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._warn = run.warn
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (
            f"sqlite:///{run.run_dir.resolve() / 'mlflow.db'}"
        )
        try:
            self._client: Any = MlflowClient(tracking_uri=uri)
            if self._id and run.continues:
                self._client.update_run(self._id, status="RUNNING")
                return
            created = self._client.create_run(
                self._experiment(run.run_dir), run_name=f"{run.name}/{run.run_dir.name}"
            )
            self._id = created.info.run_id
            keys = _flat(run.recipe.model_dump(mode="json", by_alias=True))
            self._client.log_batch(self._id, params=[Param(k, str(v)) for k, v in keys.items()])
        except MlflowException as error:
            raise RecipeError(
                f"track: mlflow cannot start at {uri}: {error}; valid: a server in "
                "MLFLOW_TRACKING_URI, or unset for a file in the run folder"
            ) from error

    def on_log(self, metrics: Metrics) -> None:
        self._log(named(metrics), metrics.step)

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        from mlflow.exceptions import MlflowException

        if summary:
            numbers = {k: v for k, v in summary.items() if type(v) in (int, float)}
            self._log({f"summary/{k}": v for k, v in numbers.items()}, int(summary["step"]))
        try:
            if self._newest:
                self._newest.wait()
            self._client.set_terminated(self._id, _STATUS[status])
        except MlflowException as error:
            self._warn(f"track: mlflow did not receive the end of the run: {error}")

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._id = state["id"]

    def _experiment(self, run_dir: Path) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "largebatch"
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        # A server stores artifacts itself; with a local file they go into the run folder.
        location = None if os.environ.get("MLFLOW_TRACKING_URI") else run_dir / "mlflow"
        return str(
            self._client.create_experiment(
                name, artifact_location=location.resolve().as_uri() if location else None
            )
        )

    def _log(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(k, float(v), now, step) for k, v in values.items() if math.isfinite(v)]
        self._newest = self._client.log_batch(self._id, metrics, synchronous=False)


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
