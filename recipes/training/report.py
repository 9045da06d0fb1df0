"""The report of a run: one picture of what happened, drawn from its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..errors import RecipeError
from ..schema.load import RECIPE
from .metrics import METRICS, read_metrics

REPORT = "report.png"


def write_report(run_dir: Path, *, title: str | None = None) -> Path:
    """Draw ``report.png``: loss, accuracy, learning rate and share of time waiting for data.

    Args:
        run_dir: a run's folder.
        title: by default the folder's name.

    Raises:
        RecipeError: the folder holds no metrics.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(run_dir)
    names = {"train": "training", "val": "validation"}
    smoothing = _label_smoothing(run_dir)
    if not lines:
        raise RecipeError(f"{run_dir} holds no run: it has no lines in {METRICS}")
    train, val = ([line for line in lines if line["split"] == s] for s in ("train", "val"))

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title or run_dir.name)
    (loss, accuracy), (rate, waiting) = figure.subplots(2, 2, sharex=True)

    for split, color in ((train, "tab:blue"), (val, "tab:orange")):
        if split:
            style: dict[str, Any] = {"color": color, "label": names[split[0]["split"]]}
            if len(split) < 60:
                style |= {"marker": "o", "markersize": 3}
            loss.plot(_column(split, "epoch"), _column(split, "loss"), **style)
            accuracy.plot(_column(split, "epoch"), _column(split, "top1"), **style)
    averaged = [line for line in val if "ema_top1" in line]
    if averaged:
        style = {"color": "tab:purple", "label": "validation, averaged weights"}
        loss.plot(_column(averaged, "epoch"), _column(averaged, "ema_loss"), **style)
        accuracy.plot(_column(averaged, "epoch"), _column(averaged, "ema_top1"), **style)
    if train:
        epochs = _column(train, "epoch")
        rate.plot(epochs, _column(train, "lr"), color="tab:green")
        shares = [100 * line["wait_seconds"] / line["seconds"] for line in train]
        waiting.plot(epochs, shares, color="tab:red")
        total = sum(_column(train, "wait_seconds")) / sum(_column(train, "seconds"))
        waits = [wait for line in train for wait in line.get("step_wait_seconds", [])]
        waiting.axhline(100 * total, color="tab:red", linestyle=":", linewidth=1)
        waiting.set_title(
            f"Waiting for data: input-bound {100 * total:.1f} % of the time"
            # which runs of earlier versions did not note
            + (f",\nlongest wait of a step {max(waits):.2f} s" if waits else "")
        )
    if val:
        accuracy.set_title(f"Top-1 accuracy: {val[-1]['top1']:.2f} % at the end")
    else:
        accuracy.set_title("Top-1 accuracy")
    loss.set_title(f"Loss (training: label smoothing {smoothing:g})" if smoothing else "Loss")
    loss.set_ylim(bottom=0)
    accuracy.set_ylabel("percent")
    accuracy.set_ylim(0, 101)
    rate.set_title("Learning rate")
    rate.set_ylim(bottom=0)
    waiting.set_ylabel("percent")
    waiting.set_ylim(0, 101)
    loss.legend(loc="upper right")
    accuracy.legend(loc="lower right")
    loss.set_xlim(left=0)
    for axes in (rate, waiting):
        axes.set_xlabel("epoch")
    for axes in (loss, accuracy, rate, waiting):
        axes.grid(alpha=0.3)
    path = run_dir / REPORT
    figure.savefig(path, dpi=110)
    return path


def _label_smoothing(run_dir: Path) -> float:
    path = run_dir / RECIPE
    try:
        recipe = yaml.safe_load(path.read_text()) if path.exists() else {}
        return float(recipe.get("label_smoothing", 0.0))
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise RecipeError(f"{path} is not a recipe: {error}") from error


def _column(lines: list[dict[str, Any]], key: str) -> list[float]:
    return [line[key] for line in lines]
