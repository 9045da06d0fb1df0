"""The sentences below a chart, and where the axis of its losses is cut."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .curves import ALL_REDUCE_WAIT, TRAINING, Chart
from .lines import number
from .run import Run
from .shares import ABSENT, Stack, is_recorded, whole


def cut(curves: Sequence[Sequence[float | None]]) -> float | None:
    """Return where to cut an axis of losses; None: nowhere.

    A run that diverges would leave nothing to see of the others. The axis is cut at twice the
    median of the first losses, if a loss is more than three times as great.

    Args:
        curves: The values of each curve.
    """
    every = [[value for value in values if value is not None] for values in curves]
    every = [values for values in every if values]
    if not every:
        return None
    first = statistics.median_low([values[0] for values in every])
    if first <= 0 or max(max(values) for values in every) <= 3 * first:
        return None
    return float(f"{2 * first:.2g}")


def caption(
    chart: Chart, label: str | None, runs: Sequence[Run], top: float | None, thinned: bool
) -> str:
    """Return the sentences below a chart.

    Args:
        chart: The chart.
        label: What its curves are of; None: of several splits.
        runs: The runs that it shows.
        top: Where its axis is cut; None: nowhere.
        thinned: Whether curves are drawn with fewer points than they have.
    """
    told = []
    if chart.key == "loss" and label in (None, TRAINING):
        smoothing = {number(run.keys.get("label_smoothing")) or 0.0 for run in runs}
        told.append("In training: the mean since the reading before.")
        if smoothing != {0.0}:
            values = ", ".join(f"{value:g}" for value in sorted(smoothing))
            told.append(f"It includes label smoothing ({values}).")
    if top is not None:
        told.append(f"The axis is cut at {top:g}; a logarithmic one shows all.")
    diverged = any(run.status == "diverged" for run in runs)
    if chart.key == "loss" and label in (None, TRAINING) and diverged:
        told.append("A cross marks the last finite loss of a run that diverged.")
    if chart.key == "top1" and label is None:
        told.append("In training: of the global batch of single steps.")
    if chart.key == "lr":
        scheduled = sum(run.schedule is not None for run in runs)
        if scheduled == len(runs):
            told.append("Of each step, from the schedule of the recipe.")
        else:
            told.append(
                "As logged" + (", or of each step where that is known." if scheduled else ".")
            )
    if chart.key == "time":
        told += _of_time(label, runs)
    if chart.key == "memory":
        told.append(
            "Of the rank with most: on a GPU the most that torch had allocated since the reading "
            "before, on a CPU the largest resident size of the process so far."
        )
    if chart.key in ("gpu_utilisation", "gpu_power"):
        told.append("At the time of the reading, on the rank with the highest value.")
    if thinned:
        told.append("Long curves are drawn with fewer points, which keep their extremes.")
    return " ".join(told)


def caption_of_stack(run: Run, found: Stack) -> str:
    """Return the sentences below the picture of the shares of a run over its steps."""
    told = ["Of rank 0's time between two readings, and at the name of each part of the whole run."]
    of_run = whole(run)
    if of_run and of_run.readings < of_run.of:
        told.append(f"{of_run.readings} of {of_run.of} readings record all parts. {ABSENT}")
    if found.merged > 1:
        told.append(f"A column is {found.merged} readings.")
    return " ".join(told)


def _of_time(label: str | None, runs: Sequence[Run]) -> list[str]:
    told = ["Of the time between two readings."]
    waits = any("all_reduce_wait_seconds" in line for run in runs for line in run.train)
    if waits and label in (None, ALL_REDUCE_WAIT):
        told.append("The wait for the all-reduce is the median over the ranks.")
    if not any(map(is_recorded, runs)):
        told.append(f"Forward pass, backward pass and optimizer are not told apart. {ABSENT}")
    return told
