"""The report of a run: one picture of its metrics and its learning rate."""

from __future__ import annotations

import math
from itertools import compress
from pathlib import Path
from typing import Any

from ..errors import RecipeError
from ..files import number
from ..schema.load import RECIPE, load
from ..schema.recipe import Recipe
from .checkpoint import CHECKPOINTS, latest, read_state
from .folder.outcome import metrics_of, step_waits
from .lr import as_logged, learning_rates
from .timeline import timeline_of

REPORT = "report.png"

_MOST_POINTS = 20_000  # of the learning rate: far more than there are pixels


def write_report(run_dir: Path, *, title: str | None = None) -> Path:
    """Draw ``report.png``: loss, accuracy, learning rate and share of time waiting for data.

    The learning rate is that of each step, computed from the run's recipe; where the folder lacks
    the recipe or a checkpoint, or the run was resumed with another learning rate than it logged
    before, only the logged values are drawn. Damaged lines of the metrics are
    left out, and values that a line lacks are gaps.

    Args:
        run_dir: A run's folder.
        title: Title of the picture; by default the folder's name.

    Returns:
        The picture's path.

    Raises:
        RecipeError: The folder holds no metrics that can be read.
        OSError: The picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = metrics_of(run_dir)
    train, val = metrics.train, metrics.val
    if not train and not val:
        raise RecipeError(f"{run_dir} holds no run: it has no metrics; valid: a run's folder")
    names = {"train": "training", "val": "validation"}
    recipe = _recipe(run_dir)
    smoothing = recipe.label_smoothing if recipe else 0.0

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    # A name may hold what matplotlib would read as mathematics, or bytes that are no UTF-8.
    name = (title or run_dir.name).encode(errors="replace").decode()
    figure.suptitle(name, parse_math=False)
    (loss, accuracy), (rate, waiting) = figure.subplots(2, 2, sharex=True)

    for split, color in ((train, "tab:blue"), (val, "tab:orange")):
        if split:
            style: dict[str, Any] = {"color": color, "label": names[split[0]["split"]]}
            if len(split) < 60:
                style |= {"marker": "o", "markersize": 3}
            loss.plot(_column(split, "epoch"), _column(split, "loss"), **style)
            if split is train:
                style["label"] = "training, a single step"
            accuracy.plot(_column(split, "epoch"), _column(split, "top1"), **style)
    with_ema = [line for line in val if "ema_top1" in line]
    if with_ema:
        style = {"color": "tab:purple", "label": "validation, EMA"}
        loss.plot(_column(with_ema, "epoch"), _column(with_ema, "ema_loss"), **style)
        accuracy.plot(_column(with_ema, "epoch"), _column(with_ema, "ema_top1"), **style)
    if train:
        epochs = _column(train, "epoch")
        rates = _learning_rates(run_dir, recipe, train) if recipe else None
        rate.plot(*(rates or (epochs, _column(train, "lr"))), color="tab:green")
        waits, seconds = _column(train, "wait_seconds"), _column(train, "seconds")
        timed = [w >= 0 and s > 0 for w, s in zip(waits, seconds, strict=True)]
        shares = [
            100 * w / s if is_timed else math.nan
            for w, s, is_timed in zip(waits, seconds, timed, strict=True)
        ]
        waiting.plot(epochs, shares, color="tab:red")
        waiting.set_title("Waiting for data: not recorded")
        if any(timed):
            total = 100 * sum(compress(waits, timed)) / sum(compress(seconds, timed))
            waiting.axhline(total, color="tab:red", linestyle=":", linewidth=1)
            longest = max((wait for line in train for wait in step_waits(line)), default=None)
            waiting.set_title(
                f"Waiting for data: {total:.1f} % of the time"
                # runs of earlier versions did not log it
                + (f",\nlongest wait of a step {longest:.2f} s" if longest is not None else "")
            )
    last = number(val[-1].get("top1")) if val else None
    accuracy.set_title(
        "Top-1 accuracy" + ("" if last is None else f": {last:.2f} % at the last evaluation")
    )
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


def _recipe(run_dir: Path) -> Recipe | None:
    """The recipe in a run's folder; None if it cannot be read."""
    try:
        return load(str(run_dir / RECIPE)).recipe
    except RecipeError:
        return None


def _learning_rates(
    run_dir: Path, recipe: Recipe, train: list[dict[str, Any]]
) -> tuple[list[float], list[float]] | None:
    """Epoch and learning rate of each step up to the last line of training.

    None without a checkpoint, which holds the number of training images, from which steps and
    epochs follow, and where the run logged other learning rates.
    """
    newest = latest(run_dir / CHECKPOINTS)
    if newest is None:
        return None
    try:
        images = read_state(newest)["loader"]["fingerprint"]["images"]
        if not isinstance(images, int) or images < 1:
            return None
        timeline = timeline_of(recipe, images)
        schedule = learning_rates(recipe, timeline).schedule
    except (RecipeError, KeyError, TypeError):  # a damaged state may be of any form
        return None
    if not as_logged(schedule, train):
        return None
    steps = train[-1]["step"]
    drawn = range(0, steps, max(1, steps // _MOST_POINTS))
    return [timeline.epoch(step) for step in drawn], [schedule(step) for step in drawn]


def _column(lines: list[dict[str, Any]], key: str) -> list[float]:
    """Values of a key; not a number, which is drawn as a gap, where a line has none."""
    values = (number(line.get(key)) for line in lines)
    return [math.nan if value is None else value for value in values]
