"""A run's metrics as JSON lines."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import RecipeError
from ...files import DamagedFileError, write_text
from ..callbacks import Callback, Metrics, RunContext, Status
from .appended import AppendedFile
from .names import METRICS as METRICS
from .outcome import read_lines


class MetricsLog(Callback):
    """Appends each line of metrics to ``metrics.jsonl`` in the run folder.

    A resumed run first removes the lines of steps that it will make again. Lines that cannot be
    written, as on a full disk, are kept in memory and written with a later one.
    """

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
        self._warn, self._path = run.warn, path

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
        with suppress(OSError):
            self._file.flush()
        self._file.close()
        if self._file.waiting:
            lines = self._file.waiting.count(b"\n")
            self._warn(f"{self._path}: {lines} lines are missing, as they could not be written")

    def _write(self, split: str, step: int, epoch: float, values: dict[str, Any]) -> None:
        line = {"split": split, "step": step, "epoch": round(epoch, 4), **values}
        warned = bool(self._file.waiting)
        try:
            self._file.append(f"{json.dumps(line)}\n".encode())
        except OSError as error:
            if not warned:
                self._warn(
                    f"{self._path} cannot be written: {error.strerror}; training goes on, and its "
                    "lines are written as soon as that is possible"
                )

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Write the lines that wait, as a run that is resumed from there needs them."""
        with suppress(OSError):
            self._file.flush()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read all lines of a run's metrics, in order; none if the file is not there.

    A last line that a crash cut short is left out.

    Raises:
        RecipeError: A line is not one that :class:`MetricsLog` writes.
    """
    path = run_dir / METRICS
    try:
        metrics = read_lines(run_dir)
    except FileNotFoundError:
        return []
    except (OSError, DamagedFileError) as error:
        problem = getattr(error, "strerror", None) or error
        raise RecipeError(f"{path} cannot be read: {problem}; mend or remove it") from None
    if metrics.damaged:
        raise RecipeError(
            f"{path}:{metrics.damaged[0]}: not a line of metrics, an object with the keys split, "
            "step and epoch; mend or remove it"
        )
    return list(metrics.lines)
