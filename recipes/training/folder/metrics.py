"""The metrics of a run, which it writes as JSON lines."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import RecipeError
from ...files import write_text
from ..callbacks import Callback, Metrics, RunContext, Status
from .names import METRICS
from .outcome import Line, read_lines


class AppendedFile:
    """A file to which pieces are appended in order, each whole, or kept until there is room."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self._file, self._size = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), size
        self._path, self.waiting = path, b""

    def append(self, piece: bytes = b"") -> None:
        """Append a piece after those that wait."""
        self.waiting += piece
        # At the end of the last whole piece, as a try before may have left a part of one.
        done = 0
        try:
            while done < len(self.waiting):
                done += os.pwrite(self._file, self.waiting[done:], self._size + done)
        except OSError as error:
            error.filename = str(self._path)
            raise
        self._size, self.waiting = self._size + done, b""

    def close(self) -> None:
        """Write what waits, and close the file."""
        try:
            self.append()
        finally:
            os.close(self._file)


class MetricsLog(Callback):
    """Appends each line of metrics to ``metrics.jsonl`` in the run folder."""

    _file: AppendedFile

    def on_start(self, run: RunContext) -> None:
        path = run.run_dir / METRICS
        kept = [line for line in read_metrics(run.run_dir) if line["step"] <= run.step]
        try:
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file = AppendedFile(path, path.stat().st_size)
        except OSError as error:
            raise RecipeError(
                f"run_dir: {path} cannot be written: {error.strerror}; valid: a folder with room"
            ) from error

    def on_log(self, metrics: Metrics) -> None:
        # JSON has no numbers that are not finite.
        finite = {name: v if math.isfinite(v) else None for name, v in metrics.values.items()}
        self._write(metrics.split, metrics.step, metrics.epoch, {**finite, **metrics.per_step})

    def on_histograms(self, name: str, step: int, epoch: float, values: dict[str, Tensor]) -> None:
        """Write the minimum, median and maximum of each layer's values."""
        lines = {
            layer: [v.item() for v in (of_layer.min(), of_layer.median(), of_layer.max())]
            for layer, of_layer in values.items()
        }
        self._write(name, step, epoch, lines)

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        self._file.close()

    def _write(self, split: str, step: int, epoch: float, values: dict[str, Any]) -> None:
        line = {"split": split, "step": step, "epoch": round(epoch, 4), **values}
        self._file.append(f"{json.dumps(line)}\n".encode())

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Write the lines that wait, as a run that is resumed from there needs them."""
        with suppress(OSError):
            self._file.append()


def read_metrics(run_dir: Path) -> list[Line]:
    """Read all lines of a run's metrics, in order; none if the file is not there."""
    metrics = read_lines(run_dir)
    if metrics.damaged:
        raise RecipeError(
            f"{run_dir / METRICS}:{metrics.damaged[0]}: not a line of metrics, an object with the "
            "keys split, step and epoch; mend or remove it"
        )
    return list(metrics.lines)
