"""The picture of a run, ``report.png``: loss, accuracy, learning rate and the wait for input."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..files import number
from ..training.folder.outcome import Line
from .run import read_run

REPORT = "report.png"

_MOST_POINTS = 20_000  # of the learning rate: far more than there are pixels


def write_picture(folder: Path, *, title: str | None = None) -> Path:
    """Draw ``report.png`` into a run's folder, and return its path.

    The learning rate is that of each step where the schedule of the recipe gives the rates that
    were logged, else as logged. Values that a line lacks are gaps.

    Args:
        folder: A run's folder.
        title: Title of the picture; by default the folder's name.

    Raises:
        RecipeError: The folder holds no run, or one without metrics.
        OSError: The picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run = read_run(folder)
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    # A name may hold what matplotlib would read as mathematics, or bytes that are no UTF-8.
    name = (title or folder.name).encode(errors="replace").decode()
    figure.suptitle(name, parse_math=False)
    (loss, accuracy), (rate, wait) = axes = figure.subplots(2, 2, sharex=True)
    averaged = [line for line in run.val if "ema_top1" in line]
    for lines, prefix, color, label in (
        (run.train, "", "tab:blue", "training"),
        (run.val, "", "tab:orange", "validation"),
        (averaged, "ema_", "tab:purple", "validation, EMA"),
    ):
        style: dict[str, Any] = {"color": color, "marker": "o" if len(lines) < 60 else ""}
        style |= {"markersize": 3, "label": label}
        if lines:
            loss.plot(_column(lines, "epoch"), _column(lines, prefix + "loss"), **style)
            style["label"] += ", a single step" if lines is run.train else ""
            accuracy.plot(_column(lines, "epoch"), _column(lines, prefix + "top1"), **style)
    epochs, rates = _column(run.train, "epoch"), _column(run.train, "lr")
    if run.train and run.timeline and run.schedule:
        last = run.train[-1]["step"]
        steps = range(0, last, max(1, last // _MOST_POINTS))
        rates = [run.schedule(step) for step in steps]
        epochs = [run.timeline.epoch(step) for step in steps]
    rate.plot(epochs, rates, color="tab:green")
    pairs = [(number(n.get("wait_seconds")), number(n.get("seconds"))) for n in run.train]
    timed = [(w, s) if w is not None and s and min(w, s) >= 0 else None for w, s in pairs]
    shares = [100 * of[0] / of[1] if of else math.nan for of in timed]
    wait.plot(_column(run.train, "epoch"), shares, color="tab:red")
    total = sum(of[1] for of in timed if of)
    share = f"{100 * sum(of[0] for of in timed if of) / total:.1f} % of the time" if total else ""
    wait.set_title(f"Wait for input: {share or 'not recorded'}")
    top1 = number(run.val[-1].get("top1")) if run.val else None
    reached = "" if top1 is None else f": {top1:.2f} % at the last evaluation"
    accuracy.set_title(f"Top-1 accuracy{reached}")
    smoothing = number(run.keys.get("label_smoothing"))
    loss.set_title("Loss" + (f" (training: label smoothing {smoothing:g})" if smoothing else ""))
    rate.set_title("Learning rate")
    for one in axes.flat:
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
