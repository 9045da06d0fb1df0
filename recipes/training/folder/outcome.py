"""What a run left in its folder: its metrics, what it reached and how it ended. The one reader.

``runs``, ``report``, ``evaluate``, ``export``, the screen at the end of a run and the model card
ask here. A run that is being written, one whose process was killed and one with damaged files are
told as they are; a value of another type is no value. Nothing is written, and nothing waited for.
Imports nothing heavy, so that runs are listed at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from ...errors import RecipeError
from ...files import (
    DamagedFileError,
    number,
    object_in,
    parse_json,
    parse_yaml,
    read_bytes,
    read_text,
    text,
    whole,
)
from ...schema.names import RECIPE, recipe_name
from .lock import holder
from .names import CHECKPOINTS, ENDING, LOCK, METRICS, SUMMARY

#: How a run ended. finished: at its last step or target; stopped: by a signal or a callback;
#: diverged: the loss or the weights are no longer finite; failed: by any other error.
Status = Literal["finished", "stopped", "diverged", "failed"]
State = Literal["running"] | Status
#: A line of metrics: ``split``, ``step``, ``epoch``, and values by name.
Line = dict[str, Any]

#: Folders inside a run's that hold no runs.
_PARTS = (CHECKPOINTS, "tensorboard", "wandb", "mlruns")
#: What both a summary and the metrics tell of a run.
_NUMBERS = ("epoch", "top1", "best_top1", "ema_top1", "train_loss", "seconds")
#: Most bytes of metrics, and of one line of them.
_MOST_BYTES, _LONGEST_LINE = 2**32, 2**24


class NoMetricsError(RecipeError):
    """Raised for a run without lines of training or an evaluation, such as one that has begun."""


@dataclass(frozen=True)
class Metrics:
    """The lines of a run's metrics, which may still be written.

    Attributes:
        lines: Those that say which split, step and epoch they are of, in the order of the file;
            numbers that are not finite are None.
        damaged: Numbers of the other lines, from 1. A last line without an end, which is being
            written or was cut short by a crash, is in neither.
    """

    lines: tuple[Line, ...] = ()
    damaged: tuple[int, ...] = ()

    def of(self, split: str) -> list[Line]:
        """The lines of a split, ascending by step."""
        return [line for line in self.lines if line["split"] == split]

    @cached_property
    def train(self) -> list[Line]:
        """Lines of the training split."""
        return self.of("train")

    @cached_property
    def val(self) -> list[Line]:
        """Lines of the evaluations."""
        return self.of("val")

    @property
    def notes(self) -> list[str]:
        """What was left out, a sentence each."""
        notes = []
        if count := len(self.damaged):
            which = ", ".join(map(str, self.damaged[:5])) + (", …" if count > 5 else "")
            what = f"line {which} is" if count == 1 else f"{count} lines ({which}) are"
            notes.append(f"{METRICS}: {what} damaged and left out.")
        return notes


@dataclass(frozen=True)
class Outcome:
    """A run, as its folder tells it.

    Attributes:
        folder: The run's folder.
        state: running: its process lives; failed: it ended by an error, or was killed.
        reason: Why it ended, without advice, or the last line of its metrics; may be empty.
        recipe: Name of its recipe.
        batch_size: Global batch size.
        optimizer: Name of its optimizer.
        epochs: Length of the run in epochs, as the recipe has it.
        step: Steps made, as its end is recorded; else those in its last line of metrics.
        epoch: Epochs in that line.
        top1: Accuracy of the last evaluation, in percent; ``best_top1`` of the best one, and
            ``ema_top1`` of the moving average of the weights in the last one.
        best_top1: See ``top1``.
        ema_top1: See ``top1``.
        train_loss: Loss in the last line of training; None also where it is not finite.
        seconds: Time spent training, in seconds, over all its parts if it was resumed.
        changed: When its metrics were last written, in seconds since 1970.
        damaged_lines: Number of lines of its metrics that cannot be read.
    """

    folder: Path
    state: State
    reason: str
    recipe: str | None
    batch_size: int | None
    optimizer: str | None
    epochs: float | None
    step: int | None
    epoch: float | None
    top1: float | None
    best_top1: float | None
    ema_top1: float | None
    train_loss: float | None
    seconds: float | None
    changed: float | None
    damaged_lines: int


def find_runs(root: Path) -> Iterator[Path]:
    """The folders of runs at and under a folder, in the order of their names.

    Links to folders are not followed, and folders that cannot be read are left out.
    """
    for folder, folders, files in os.walk(root):
        is_run = METRICS in files or LOCK in files or ENDING in files
        if is_run:
            yield Path(folder)
        left_out = _PARTS if is_run else ()
        folders[:] = sorted(f for f in folders if f not in left_out and not f.startswith("."))


def has_metrics(folder: Path) -> bool:
    """Whether a run has written into a folder."""
    return (folder / METRICS).exists()


def metrics_of(folder: Path) -> Metrics:
    """Read a run's metrics; none where there are none that can be read."""
    try:
        return read_lines(folder)
    except (OSError, DamagedFileError):
        return Metrics()


def read_lines(folder: Path) -> Metrics:
    """Read a run's metrics.

    Raises:
        OSError: There are none, or they cannot be read.
        DamagedFileError: They are in no file.
    """
    *whole_lines, _ = read_bytes(folder / METRICS, _MOST_BYTES).split(b"\n")
    found: list[Line] = []
    damaged = []
    for place, content in enumerate(whole_lines, 1):
        if not content:
            continue
        line = _placed(content)
        if line is None:
            damaged.append(place)
        else:
            found.append(line)
    return Metrics(tuple(found), tuple(damaged))


def begun_metrics(folder: Path) -> Metrics:
    """Read the metrics of a run that is to be reported: it has a line of training or an evaluation.

    Raises:
        NoMetricsError: It has none yet.
        RecipeError: The folder holds no run.
    """
    try:
        metrics = read_lines(folder)
    except (FileNotFoundError, NotADirectoryError):
        what = "holds no run" if folder.is_dir() else "is no folder"
        raise RecipeError(
            f"RUN: {folder} {what}; valid: a run's folder, which holds {METRICS}"
        ) from None
    except (OSError, DamagedFileError) as error:
        problem = getattr(error, "strerror", None) or error
        raise RecipeError(f"RUN: {folder / METRICS} cannot be read: {problem}") from None
    if not (metrics.train or metrics.val):
        why = "; " + " ".join(metrics.notes) if metrics.notes else " yet"
        raise NoMetricsError(
            f"RUN: {folder} has no metrics{why}; the first line is written after log_every steps"
        )
    return metrics


def best(val: Sequence[Line]) -> Line | None:
    """The evaluation with the best top-1 accuracy, the first of equal ones, or None."""
    having = [line for line in val if number(line.get("top1")) is not None]
    return max(having, key=lambda line: line["top1"], default=None)


def first_at(val: Sequence[Line], top1: float) -> Line | None:
    """The first evaluation that reached a top-1 accuracy in percent."""
    having = ((number(line.get("top1")), line) for line in val)
    return next((line for found, line in having if found is not None and found >= top1), None)


def column(lines: Sequence[Line], name: str) -> list[float]:
    """The numbers of a name in the lines that have one."""
    return [found for line in lines if (found := number(line.get(name))) is not None]


def step_waits(line: Line) -> list[float]:
    """How long each step waited for data, in seconds; empty where that is not recorded."""
    waits = line.get("step_wait_seconds")
    return [number(wait) or 0.0 for wait in waits] if isinstance(waits, list) else []


def images_in(lines: Sequence[Line]) -> float:
    """Images of the steps that lines of training are of."""
    pairs = ((number(n.get("images_per_second")), number(n.get("seconds"))) for n in lines)
    return sum((rate or 0.0) * (seconds or 0.0) for rate, seconds in pairs)


def outcome_of(folder: Path) -> Outcome:
    """Tell how a run goes, or how it ended, from its folder."""
    recipe = recipe_of(folder)
    ending, summary = object_in(folder / ENDING), object_in(folder / SUMMARY)
    held = holder(folder)
    metrics = Metrics()
    # A finished run's summary holds all that is told; its metrics may be long.
    if (held and held[1]) or ending.get("status") != "finished" or "step" not in summary:
        metrics = metrics_of(folder)
        values = _values(metrics)
    else:
        values = {**summary, "seconds": summary.get("train_seconds")}
    state, reason = _state(folder, ending, summary, held, metrics)
    optimizer, epochs = recipe.get("optimizer"), number(recipe.get("epochs"))
    numbers: dict[str, Any] = {name: number(values.get(name)) for name in _NUMBERS}
    return Outcome(
        folder=folder,
        state=state,
        reason=reason,
        recipe=text(recipe.get("name") or summary.get("recipe")),
        batch_size=whole(recipe.get("batch_size")),
        optimizer=text(optimizer.get("name")) if isinstance(optimizer, dict) else None,
        epochs=None if epochs is None else float(epochs),
        step=whole(ending.get("step", values.get("step"))),
        changed=_changed(folder),
        damaged_lines=len(metrics.damaged),
        **numbers,
    )


def name_of(folder: Path) -> str | None:
    """The name of the recipe of a run; None if it is not known."""
    return text(recipe_of(folder).get("name") or object_in(folder / SUMMARY).get("recipe"))


def _placed(content: bytes) -> Line | None:
    """A line of metrics that says which split, step and epoch it is of."""
    if len(content) > _LONGEST_LINE:
        return None
    try:
        line = parse_json(content)
    except DamagedFileError:
        return None
    if not isinstance(line, dict) or whole(line.get("step")) is None:
        return None
    if text(line.get("split")) is None or number(line.get("epoch")) is None:
        return None
    return {name: _finite(value) for name, value in line.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return number(value) if is_number else value


def _state(
    folder: Path,
    ending: dict[str, Any],
    summary: dict[str, Any],
    held: tuple[str, bool] | None,
    metrics: Metrics,
) -> tuple[State, str]:
    last = metrics.lines[-1] if metrics.lines else None
    if held and held[1]:
        return "running", _last_line(folder, last)
    status: Any = ending.get("status")
    early = _early(summary)
    if status in get_args(Status):
        return status, text(ending.get("reason")) or (early if status == "finished" else "")
    if held:
        return "failed", f"{held[0]} ended without a word, as if it was killed"
    if "step" in summary:  # of a run whose end found no room to be recorded
        return "finished", early
    return "stopped", "its end is not recorded"


def _early(summary: dict[str, Any]) -> str:
    """A note about a run that finished before the end of its schedule."""
    step, total = whole(summary.get("step")), whole(summary.get("total_steps"))
    if step is not None and total is not None and step < total:
        return f"at step {step:,} of {total:,}, by stop_after or target_accuracy"
    return ""


def _last_line(folder: Path, line: Line | None) -> str:
    if line is None:
        return "no metrics yet"
    told = [f"{line['split']} at step {line['step']}"]
    loss, top1, changed = number(line.get("loss")), number(line.get("top1")), _changed(folder)
    told += [f"loss {loss:.3f}"] if loss is not None else []
    told += [f"top-1 {top1:.2f} %"] if top1 is not None else []
    if changed is not None:
        told.append(f"{max(0.0, time.time() - changed):,.0f} s ago")
    return ", ".join(told)


def _values(metrics: Metrics) -> dict[str, Any]:
    """What the metrics tell of a run, under the names of a summary."""
    lines, train, val = metrics.lines, metrics.train, metrics.val
    top1, best_line = column(val, "top1"), best(val)
    return {
        "step": lines[-1]["step"] if lines else None,
        "epoch": lines[-1]["epoch"] if lines else None,
        "top1": top1[-1] if top1 else None,
        "best_top1": best_line["top1"] if best_line else None,
        "ema_top1": val[-1].get("ema_top1") if val else None,
        "train_loss": train[-1].get("loss") if train else None,
        "seconds": sum(column(train, "seconds")) if train else None,
    }


def recipe_of(folder: Path) -> dict[str, Any]:
    """The recipe in a run's folder with its ``name``, not validated; empty if there is none."""
    try:
        written = read_text(folder / RECIPE)
        content = parse_yaml(written)
    except (OSError, DamagedFileError):
        return {}
    named = recipe_name(written)
    return {**(content if isinstance(content, dict) else {}), **({"name": named} if named else {})}


def _changed(folder: Path) -> float | None:
    try:
        return (folder / METRICS).stat().st_mtime
    except OSError:
        return None
