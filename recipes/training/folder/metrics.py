"""What a run writes as JSON lines: its metrics, and the images that it skipped."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ....pipeline import Loader
from ...errors import RecipeError
from ...files import DamagedFileError, parse_json, read_bytes, write_text
from ...ranks import Job
from ..callbacks import Callback, Metrics, RunContext, Status
from .names import METRICS, SKIPPED
from .outcome import Line, read_lines

_MOST_SKIPPED_BYTES = 2**30


class AppendedFile:
    """A file to which pieces are appended in order, each whole, or kept until there is room."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self._file, self._size = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), size
        self.waiting = b""

    def append(self, piece: bytes = b"") -> None:
        """Append a piece after those that wait."""
        self.waiting += piece
        # At the end of the last whole piece, as a try before may have left a part of one.
        done = 0
        while done < len(self.waiting):
            done += os.pwrite(self._file, self.waiting[done:], self._size + done)
        self._size, self.waiting = self._size + done, b""

    def close(self) -> None:
        """Write what waits, if there is room now, and close the file."""
        with suppress(OSError):
            self.append()
        with suppress(OSError):
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


class SkippedImages:
    """Collects the unusable images that the loaders of all ranks, by split, have met."""

    def __init__(self, run_dir: Path, job: Job, loaders: Mapping[str, Loader | None]) -> None:
        self._path, self._job = run_dir / SKIPPED, job
        self._loaders = {split: loader for split, loader in loaders.items() if loader}
        self._shown = 0  # images of this rank
        self._lines = dict(_read(self._path)) if job.is_main else {}
        self._written = 0  # number of lines in the file

    @property
    def news(self) -> int:
        """Number of images that this rank has found since the last :meth:`show`."""
        return sum(len(loader.skipped) for loader in self._loaders.values()) - self._shown

    @property
    def count(self) -> int:
        """Number of images in the list, on rank 0."""
        return len(self._lines)

    def show(self, warn: Callable[[str], None]) -> None:
        """Add the images found on all ranks to the list, and warn of new ones; a collective."""
        found = [
            {"split": split, "image": image, "what": what}
            for split, loader in self._loaders.items()
            for image, what in loader.skipped.items()
        ]
        self._shown = len(found)
        everyone = [entry for entries in self._job.gather(found) for entry in entries]
        for entry in everyone if self._job.is_main else ():
            if entry["image"] not in self._lines:
                self._lines[entry["image"]] = json.dumps(entry, ensure_ascii=False)
                warn(f"skipped {entry['image']}: {entry['what']}")
        if len(self._lines) > self._written:
            try:  # anew, so that a disk that is full leaves the old list
                write_text(self._path, "".join(f"{line}\n" for line in self._lines.values()))
                self._written = len(self._lines)
            except OSError as error:  # tried again when there are more, and at the end of the run
                warn(f"{self._path} cannot be written: {error.strerror}")


def _read(path: Path) -> Iterator[tuple[str, str]]:
    """The image and the line of each in a run that is resumed; damaged ones are found again."""
    with suppress(OSError, DamagedFileError):
        for content in read_bytes(path, _MOST_SKIPPED_BYTES).split(b"\n")[:-1]:
            with suppress(DamagedFileError):
                line = parse_json(content)
                if isinstance(line, dict) and "image" in line:
                    yield str(line["image"]), json.dumps(line, ensure_ascii=False)
