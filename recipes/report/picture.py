"""The picture of a run, ``report.png``: loss, accuracy, learning rate and the wait for input."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..files import number
from ..training.folder.outcome import Line, begun_metrics

REPORT = "report.png"


def write_picture(folder: Path, *, title: str | None = None) -> Path:
    """Draw ``report.png`` into a run's folder, and return its path; absent values are gaps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = begun_metrics(folder)
    train, val = metrics.train, metrics.val
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    # A name may hold what matplotlib would read as mathematics, or bytes that are no UTF-8.
    name = (title or folder.name).encode(errors="replace").decode()
    figure.suptitle(name, parse_math=False)
    (loss, accuracy), (rate, wait) = figure.subplots(2, 2, sharex=True)
    for lines, prefix, color, label in (
        (train, "", "tab:blue", "training"),
        (val, "", "tab:orange", "validation"),
        ([line for line in val if "ema_top1" in line], "ema_", "tab:purple", "validation, EMA"),
    ):
        style: dict[str, Any] = {"color": color, "marker": "o" if len(lines) < 60 else ""}
        style |= {"markersize": 3, "label": label}
        if lines:
            loss.plot(_column(lines, "epoch"), _column(lines, prefix + "loss"), **style)
            style["label"] += ", a single step" if lines is train else ""
            accuracy.plot(_column(lines, "epoch"), _column(lines, prefix + "top1"), **style)
    epochs, seconds, waits = (_column(train, key) for key in ("epoch", "seconds", "wait_seconds"))
    rate.plot(epochs, _column(train, "lr"), color="tab:green")
    shares = [100 * w / s if s else math.nan for w, s in zip(waits, seconds, strict=True)]
    wait.plot(epochs, shares, color="tab:red")
    top1 = number(val[-1].get("top1")) if val else None
    reached = "" if top1 is None else f": {top1:.2f} % at the last evaluation"
    for one, heading in (
        (loss, "Loss"),
        (accuracy, f"Top-1 accuracy{reached}"),
        (rate, "Learning rate"),
        (wait, "Wait for input, slowest rank"),
    ):
        one.set_title(heading)
        one.grid(alpha=0.3)
        one.set_xlim(left=0)
        one.set_ylim(0, 101 if one in (accuracy, wait) else None)
    for one in (accuracy, wait):
        one.set_ylabel("percent")
    for one in (rate, wait):
        one.set_xlabel("epoch")
    loss.legend(loc="upper right")
    accuracy.legend(loc="lower right")
    path = folder / REPORT
    figure.savefig(path, dpi=110)
    return path


def _column(lines: list[Line], key: str) -> list[float]:
    """Values of a key; not a number, which is drawn as a gap, where a line has none."""
    values = (number(line.get(key)) for line in lines)
    return [math.nan if value is None else value for value in values]
