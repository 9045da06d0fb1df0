"""MLflow (https://mlflow.org/docs/latest). MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME apply.

Without a server, all goes into ``mlflow.db`` in the run folder, an SQLite database, which
``mlflow ui --backend-store-uri sqlite:///RUN_DIR/mlflow.db`` shows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from time import time
from typing import Any

from ....errors import RecipeError
from ...callbacks import Metrics, RunContext, Status
from . import Tracker, named


class MLflow(Tracker):
    """Logs the recipe's keys of the first start, metrics that are finite, and the summary."""

    package = extra = "mlflow"
    _newest: Any = None  # the last request; they are sent in the background

    def on_start(self, run: RunContext) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._warn, database = run.warn, run.run_dir.resolve() / "mlflow.db"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database}"
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "largebatch"
        try:
            self._client: Any = MlflowClient(tracking_uri=uri)
            if self.id and run.continues:
                self._client.update_run(self.id, status="RUNNING")
                return
            found = self._client.get_experiment_by_name(experiment)
            at = found.experiment_id if found else self._client.create_experiment(experiment)
            started = self._client.create_run(at, run_name=f"{run.name}/{run.run_dir.name}")
            self.id = started.info.run_id
            keys = _flat(run.recipe.model_dump(mode="json", by_alias=True))
            self._client.log_batch(self.id, params=[Param(k, str(v)) for k, v in keys])
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
            numbers = {f"summary/{k}": v for k, v in summary.items() if type(v) in (int, float)}
            self._log(numbers, summary["step"])
        ended = {"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED")
        try:
            if self._newest:
                self._newest.wait()
            self._client.set_terminated(self.id, ended)
        except MlflowException as error:
            self._warn(f"track: mlflow did not receive the end of the run: {error}")

    def _log(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time())
        metrics = [Metric(k, float(v), now, step) for k, v in values.items() if math.isfinite(v)]
        self._newest = self._client.log_batch(self.id, metrics, synchronous=False)


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested keys as dotted keys."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
