"""Metrics for TensorBoard, in the folder ``tensorboard`` of the run.

Scalars are named ``train/loss``, ``val/top1`` and so on, by step. A resumed run continues in the
same folder and hides the values of the steps that it repeats (``purge_step``).

Events are written here, and not by torch's ``SummaryWriter``, whose thread prints a traceback and
ends where the disk is full.
"""

from __future__ import annotations

import io
import os
import socket
import time
from typing import Any

import numpy as np
from torch import Tensor

from ....errors import RecipeError
from ...callbacks import Metrics, RunContext, Status
from ...folder.metrics import AppendedFile
from . import Tracker, named

_VERSION = "brain.Event:2"  # of the format of event files


class TensorBoard(Tracker):
    """Writes scalars, and histograms of trust ratios, as TensorBoard event files."""

    package, extra = "tensorboard", "recipes"

    def on_start(self, run: RunContext) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        folder = run.run_dir / "tensorboard"
        # The start of the name is what TensorBoard looks for; the rest makes it unique.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        try:
            folder.mkdir(exist_ok=True)
            self._file = AppendedFile(folder / name)
            self._write([{"file_version": _VERSION}], 0)
            if run.step:
                start = {"session_log": SessionLog(status=SessionLog.START)}
                self._write([{"file_version": _VERSION}, start], run.step + 1)
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

        edges = _edges()
        events = [
            {"summary": histogram(f"{name}/{layer}", of_layer, edges)}
            for layer, of_layer in values.items()
        ]
        self._write(events, step)

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        try:
            self._file.flush()
        finally:
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


def _edges() -> list[float]:
    """Edges of a histogram's bins, each 1.1 times the one before, as TensorFlow has them."""
    positive = 1e-12 * 1.1 ** np.arange(774)  # up to 1e20
    return [*-positive[::-1], 0.0, *positive]
