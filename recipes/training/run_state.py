"""The state of a run, told from what is in its folder. Imports nothing heavy.

A run that is being written, one whose process was killed and one with damaged files are told as
they are: nothing in a folder is an error here.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..schema.names import RECIPE, recipe_name
from .ending import Status
from .metric_lines import number, parse_lines
from .run_files import CHECKPOINTS, ENDING, METRICS, SUMMARY
from .run_lock import LOCK, holder

State = Literal["running", "stopped", "finished", "diverged", "failed"]

#: Folders inside a run's that hold no runs.
_PARTS = (CHECKPOINTS, "tensorboard", "wandb", "mlruns")
#: The beginning of a reason that the state says already.
_DIVERGED = "training diverged: "


@dataclass(frozen=True)
class RunState:
    """A run, as its folder tells it.

    Attributes:
        folder: The run's folder.
        state: running: its process lives; failed: it ended by an error, or was killed.
        reason: Why it ended, or the last line of its metrics; may be empty.
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


def run_state(folder: Path) -> RunState:
    """Tell the state of a run from its folder."""
    recipe = _recipe(folder)
    ending = read_object(folder / ENDING)
    held = holder(folder)
    lives = held is not None and held[1]
    lines: list[dict[str, Any]] = []
    damaged: list[int] = []
    summary = read_object(folder / SUMMARY)
    # A finished run's summary holds all that is told; its metrics may be long.
    if lives or ending.get("status") != "finished" or "step" not in summary:
        lines, damaged = read_lines(folder)
        values = _of_lines(lines)
    else:
        names = ("step", "epoch", "top1", "best_top1", "ema_top1", "train_loss")
        values = {name: summary.get(name) for name in names}
        values["seconds"] = summary.get("train_seconds")
    changed = _changed(folder / METRICS)
    state, reason = _state(ending, held, summary, lines, changed)
    name = recipe.get("name") or summary.get("recipe")
    return RunState(
        folder=folder,
        state=state,
        reason=_with(reason, len(damaged)),
        recipe=name if isinstance(name, str) else None,
        batch_size=_number(recipe.get("batch_size"), int),
        optimizer=_text(recipe.get("optimizer"), "name"),
        epochs=_number(recipe.get("epochs"), float),
        step=_number(ending.get("step", values["step"]), int),
        epoch=_number(values["epoch"], float),
        top1=_number(values["top1"], float),
        best_top1=_number(values["best_top1"], float),
        ema_top1=_number(values["ema_top1"], float),
        train_loss=_number(values["train_loss"], float),
        seconds=_number(values["seconds"], float),
        changed=changed,
        damaged_lines=len(damaged),
    )


def state_and_reason(folder: Path, lines: list[dict[str, Any]]) -> tuple[State, str]:
    """Tell the state of a run, and why it ended, where its lines of metrics are read already."""
    return _state(
        read_object(folder / ENDING),
        holder(folder),
        read_object(folder / SUMMARY),
        lines,
        _changed(folder / METRICS),
    )


def short_reason(reason: str) -> str:
    """A reason without its advice, and without what the state says already."""
    return reason.removeprefix(_DIVERGED).partition("; ")[0]


def read_lines(folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """As :func:`parse_lines`, of the metrics in a run's folder; empty if they cannot be read."""
    try:
        return parse_lines((folder / METRICS).read_bytes())
    except OSError:
        return [], []


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty if there is none that can be read."""
    try:
        content: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _state(
    ending: dict[str, Any],
    held: tuple[str, bool] | None,
    summary: dict[str, Any],
    lines: list[dict[str, Any]],
    changed: float | None,
) -> tuple[State, str]:
    if held and held[1]:
        return "running", _last_line(lines, changed)
    status: Any = ending.get("status")
    if status in get_args(Status):
        early = _early(summary) if status == "finished" else ""
        return status, _text(ending, "reason") or early
    if held:
        return "failed", f"{held[0]} ended without a word, as if it was killed"
    # A run of a version that did not record its end, or one that could not. A summary of another
    # step than the last one is of a part of the run, which went on after it.
    if "step" in summary and (not lines or summary["step"] == lines[-1]["step"]):
        return "finished", _early(summary)
    last = [*lines[-1:], *[line for line in lines if line["split"] == "train"][-1:]]
    if of := [line for line in last if "loss" in line and _is_lost(line["loss"])]:
        return "diverged", f"the loss is not finite at step {of[0]['step']}"
    return "stopped", "its end is not recorded"


def _is_lost(loss: Any) -> bool:
    """Whether a loss is not finite, for which the trainer writes null."""
    return loss is None or (isinstance(loss, float) and not math.isfinite(loss))


def _early(summary: dict[str, Any]) -> str:
    """A note about a run that finished before the end of its schedule."""
    step, total = summary.get("step"), summary.get("total_steps")
    if isinstance(step, int) and isinstance(total, int) and step < total:
        return f"at step {step:,} of {total:,}, by stop_after or target_accuracy"
    return ""


def _last_line(lines: list[dict[str, Any]], changed: float | None) -> str:
    if not lines:
        return "no metrics yet"
    line = lines[-1]
    told = [f"{line['split']} at step {line['step']}"]
    loss, top1 = _number(line.get("loss"), float), _number(line.get("top1"), float)
    told += [f"loss {loss:.3f}"] if loss is not None else []
    told += [f"top-1 {top1:.2f} %"] if top1 is not None else []
    if changed is not None:
        told.append(f"{max(0.0, time.time() - changed):,.0f} s ago")
    return ", ".join(told)


def _of_lines(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the lines of metrics tell of a run."""
    train = [line for line in lines if line["split"] == "train"]
    val = [line for line in lines if line["split"] == "val"]
    top1 = [found for line in val if (found := _number(line.get("top1"), float)) is not None]
    seconds = [_number(line.get("seconds"), float) or 0.0 for line in train]
    return {
        "step": lines[-1]["step"] if lines else None,
        "epoch": lines[-1]["epoch"] if lines else None,
        "top1": top1[-1] if top1 else None,
        "best_top1": max(top1, default=None),
        "ema_top1": val[-1].get("ema_top1") if val else None,
        "train_loss": train[-1].get("loss") if train else None,
        "seconds": sum(seconds) if train else None,
    }


def _recipe(folder: Path) -> dict[str, Any]:
    """The recipe in a run's folder with its ``name``; empty if it cannot be read."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if it was built
    try:
        text = (folder / RECIPE).read_text(encoding="utf-8")
        content: Any = yaml.load(text, Loader=loader)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    named = recipe_name(text)
    name = {"name": named} if named else {}
    return {**content, **name} if isinstance(content, dict) else name


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _with(reason: str, damaged: int) -> str:
    if not damaged:
        return reason
    what = f"{damaged} damaged line{'s' if damaged > 1 else ''} in {METRICS}"
    return f"{reason}; {what}" if reason else what


def _number(value: Any, kind: type[int] | type[float]) -> Any:
    """A finite number, else None."""
    return None if number(value) is None else kind(value)


def _text(section: Any, key: str) -> str | None:
    value = section.get(key) if isinstance(section, dict) else None
    return value if isinstance(value, str) else None
