"""Experiment trackers, each in a few lines on its own package, which only its recipe needs.

- TensorBoard, in the folder ``tensorboard`` of the run. A resumed run continues there and hides the
  values of the steps that it repeats (``purge_step``). Events are written here, and not by torch's
  ``SummaryWriter``, whose thread prints a traceback and ends where the disk is full.
- Weights & Biases (https://docs.wandb.ai). WANDB_PROJECT and its other variables apply.
  WANDB_MODE=offline keeps everything in the run folder until ``wandb sync``.
- MLflow (https://mlflow.org/docs/latest). MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME apply.
  Without a server, all goes into ``mlflow.db`` in the run folder, an SQLite database, which
  ``mlflow ui --backend-store-uri sqlite:///RUN_DIR/mlflow.db`` shows.
"""

from __future__ import annotations

import importlib.util
import io
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...errors import RecipeError
from ...ranks import Job
from ..callbacks import Callback, Metrics, RunContext, Status
from ..folder.metrics import AppendedFile


class Tracker(Callback):
    """A callback on a package that is needed only if a recipe names the tracker."""

    package: str  # the name under which it is imported
    extra: str  # of largebatch, that installs it
    id: str | None = None  # the tracker's own, if any, under which a resumed run continues

    def check(self, recipe: Any, run_dir: Path, job: Job) -> None:
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


class TensorBoard(Tracker):
    """Writes scalars, and histograms of trust ratios, as TensorBoard event files."""

    package, extra = "tensorboard", "recipes"

    def on_start(self, run: RunContext) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        folder = run.run_dir / "tensorboard"
        # The start of the name is what TensorBoard looks for; the rest makes it unique.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        version = {"file_version": "brain.Event:2"}
        try:
            folder.mkdir(exist_ok=True)
            self._file = AppendedFile(folder / name)
            self._write([version], 0)
            if run.step:
                start = {"session_log": SessionLog(status=SessionLog.START)}
                self._write([version, start], run.step + 1)
        except OSError as error:
            raise RecipeError(
                f"run_dir: {folder} cannot be written: {error.strerror}; valid: a folder with room"
            ) from error

    def on_log(self, metrics: Metrics) -> None:
        from torch.utils.tensorboard.summary import scalar

        events = [{"summary": scalar(name, value)} for name, value in named(metrics).items()]
        self._write(events, metrics.step)

    def on_histograms(self, name: str, step: int, epoch: float, values: dict[str, Tensor]) -> None:
        from torch.utils.tensorboard.summary import histogram

        # Edges of the bins, each 1.1 times the one before, as TensorFlow has them.
        positive = 1e-12 * 1.1 ** np.arange(774)  # up to 1e20
        edges = [*-positive[::-1], 0.0, *positive]
        found = (histogram(f"{name}/{layer}", of, edges) for layer, of in values.items())
        self._write([{"summary": one} for one in found], step)

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        self._file.close()

    def _write(self, events: list[dict[str, Any]], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        records = io.BytesIO()
        writer = RecordWriter(records)
        for content in events:
            event = Event(wall_time=time.time(), step=step, **content)
            writer.write(event.SerializeToString())
        self._file.append(records.getvalue())


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

        numbers = {f"summary/{k}": v for k, v in summary.items() if type(v) in (int, float)}
        ended = {"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED")
        try:
            if numbers:
                self._log(numbers, summary["step"])
            if self._newest:
                self._newest.wait()
            self._client.set_terminated(self.id, ended)
        except MlflowException as error:
            self._warn(f"track: mlflow did not receive the end of the run: {error}")

    def _log(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(k, float(v), now, step) for k, v in values.items() if math.isfinite(v)]
        self._newest = self._client.log_batch(self.id, metrics, synchronous=False)


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested keys as dotted keys."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
