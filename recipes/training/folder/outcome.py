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


class NoMetricsError(RecipeError):
    """Raised for a run without lines of training or an evaluation, such as one that has begun."""


@dataclass(frozen=True)
class Metrics:
    """The lines of a run's metrics, which may still be written."""

    #: Those that say which split, step and epoch they are of; numbers that are not finite are None.
    lines: tuple[Line, ...] = ()
    damaged: tuple[int, ...] = ()  # numbers of the other lines, from 1

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
        count, which = len(self.damaged), ", ".join(map(str, self.damaged[:5]))
        which += ", …" if count > 5 else ""
        what = f"line {which} is" if count == 1 else f"{count} lines ({which}) are"
        return [f"{METRICS}: {what} damaged and left out."] if count else []


@dataclass(frozen=True)
class Outcome:
    """A run, as its folder tells it; what is not known of it is None."""

    folder: Path
    state: State  # running: its process lives; failed: it ended by an error, or was killed
    reason: str  # why it ended, without advice, or the last line of its metrics; may be empty
    recipe: str | None  # the name of its recipe
    batch_size: int | None  # global
    optimizer: str | None
    epochs: float | None  # length of the run, as the recipe has it
    step: int | None  # steps made, as its end is recorded; else those in its last line of metrics
    epoch: float | None  # epochs in that line
    top1: float | None  # of the last evaluation, in percent
    best_top1: float | None  # of the best evaluation
    ema_top1: float | None  # of the moving average of the weights in the last evaluation
    train_loss: float | None  # in the last line of training; None also where it is not finite
    seconds: float | None  # spent training, over all its parts if it was resumed
    changed: float | None  # when its metrics were last written, in seconds since 1970
    damaged_lines: int  # lines of its metrics that cannot be read


def find_runs(root: Path) -> Iterator[Path]:
    """The folders of runs at and under a folder, in the order of their names."""
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
    except RecipeError:
        return Metrics()


def read_lines(folder: Path) -> Metrics:
    """Read a run's metrics; none if they are not there."""
    path = folder / METRICS
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Metrics()
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
        raise RecipeError(f"{problem}; valid: a readable file") from None
    *whole_lines, _ = content.split(b"\n")
    found = [(place, _placed(one)) for place, one in enumerate(whole_lines, 1) if one]
    return Metrics(
        tuple(line for _, line in found if line),
        tuple(place for place, line in found if line is None),
    )


def begun_metrics(folder: Path) -> Metrics:
    """Read the metrics of a run to report; raises NoMetricsError if it has none yet."""
    metrics = read_lines(folder)
    if not has_metrics(folder):
        what = "holds no run" if folder.is_dir() else "is no folder"
        raise RecipeError(f"RUN: {folder} {what}; valid: a run's folder, which holds {METRICS}")
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


def results_of(metrics: Metrics) -> dict[str, Any]:
    """What a run has reached so far, by the names of ``summary.json`` that it has."""
    train, val = metrics.train, metrics.val
    found = {name: metrics.lines[-1][name] for name in ("step", "epoch")} if metrics.lines else {}
    if train:
        seconds, waited = (sum(column(train, name)) for name in ("seconds", "wait_seconds"))
        startup = next(iter(step_waits(train[0])), None)
        steady, rest = waited - (startup or 0.0), seconds - (startup or 0.0)
        found |= {
            "train_seconds": round(seconds, 2),
            "images_per_second": round(images_in(train) / max(seconds, 1e-9), 1),
            "wait_share": round(waited / max(seconds, 1e-9), 4),
            "startup_seconds": startup,
            "steady_wait_share": round(max(0.0, steady) / max(rest, 1e-9), 4),
            "longest_wait_seconds": max(
                (w for line in train for w in step_waits(line)), default=None
            ),
            "train_loss": number(train[-1].get("loss")),
        }
    if val:
        last = {name: number(value) for name, value in val[-1].items()}
        found |= {"top1": next(reversed(column(val, "top1")), None), "top5": last.get("top5")}
        found |= {"val_loss": last.get("loss"), "evaluated_step": last["step"]}
        found["evaluate_seconds"] = round(sum(column(val, "seconds")), 2)
        if best_line := best(val):
            found |= {"best_top1": best_line["top1"], "best_epoch": best_line["epoch"]}
        if "ema_top1" in last:
            names = {"ema_top1": "ema_top1", "ema_top5": "ema_top5", "ema_val_loss": "ema_loss"}
            found |= {name: last.get(of) for name, of in names.items()}
    return found


def outcome_of(folder: Path) -> Outcome:
    """Tell how a run goes, or how it ended, from its folder."""
    recipe = recipe_of(folder)
    ending, values = object_in(folder / ENDING), object_in(folder / SUMMARY)
    held = holder(folder)
    state, reason = _state(ending, values, held)
    named, metrics = text(recipe.get("name") or values.get("recipe")), Metrics()
    # A finished run's summary holds all that is told; its metrics may be long.
    if not (state == ending.get("status") == "finished" and "step" in values):
        metrics = metrics_of(folder)
        values = results_of(metrics)
    changed = _changed(folder)
    if state == "running":
        reason = _last_line(metrics.lines, changed)
    optimizer = recipe.get("optimizer")
    names = ("epoch", "top1", "best_top1", "ema_top1", "train_loss")
    numbers: dict[str, Any] = {name: number(values.get(name)) for name in names}
    return Outcome(
        folder=folder,
        state=state,
        reason=reason,
        recipe=named,
        batch_size=whole(recipe.get("batch_size")),
        optimizer=text(optimizer.get("name")) if isinstance(optimizer, dict) else None,
        epochs=number(recipe.get("epochs")),
        step=whole(ending.get("step", values.get("step"))),
        seconds=number(values.get("train_seconds")),
        changed=changed,
        damaged_lines=len(metrics.damaged),
        **numbers,
    )


def _placed(content: bytes) -> Line | None:
    """A line of metrics that says which split, step and epoch it is of."""
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
    ending: dict[str, Any], summary: dict[str, Any], held: tuple[str, bool] | None
) -> tuple[State, str]:
    """A run's state and the reason of its end, by its files and the holder of its lock."""
    if held and held[1]:
        return "running", ""
    step, total = whole(summary.get("step")), whole(summary.get("total_steps"))
    early = ""
    if step is not None and total is not None and step < total:
        early = f"at step {step:,} of {total:,}, by stop_after or target_accuracy"
    status: Any = ending.get("status")
    if status in get_args(Status):
        return status, text(ending.get("reason")) or (early if status == "finished" else "")
    if held:
        return "failed", f"{held[0]} ended without a word, as if it was killed"
    if "step" in summary:  # of a run whose end found no room to be recorded
        return "finished", early
    return "stopped", "its end is not recorded"


def _last_line(lines: Sequence[Line], changed: float | None) -> str:
    """The last line of metrics in words, with its age."""
    if not lines:
        return "no metrics yet"
    told = [f"{lines[-1]['split']} at step {lines[-1]['step']}"]
    told += [f"loss {loss:.3f}" for loss in column(lines[-1:], "loss")]
    told += [f"top-1 {top1:.2f} %" for top1 in column(lines[-1:], "top1")]
    told += [f"{max(0.0, time.time() - changed):,.0f} s ago"] if changed else []
    return ", ".join(told)


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
