"""What runs and groups of runs reached: accuracy, loss, time, and the way to a target.

Over seeds these are means with 95 % intervals by Student's t, and differences with Welch's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..files import number
from ..training.folder.outcome import best, column, first_at, images_in
from .groups import Group
from .run import Run

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Quantity:
    """A quantity that a run reaches: its heading, its unit, and the decimals to show."""

    title: str
    unit: str = ""
    digits: int = 2


#: By their names in JSON.
QUANTITIES = {
    "top1": Quantity("last top-1", "%"),
    "best_top1": Quantity("best top-1", "%"),
    "top5": Quantity("last top-5", "%"),
    "ema_top1": Quantity("top-1 of EMA", "%"),
    "val_loss": Quantity("validation loss", "", 4),
    "train_loss": Quantity("training loss", "", 4),
    "epochs": Quantity("epochs"),
    "steps": Quantity("steps", "", 0),
    "train_seconds": Quantity("training time", "s", 1),
    "evaluate_seconds": Quantity("evaluation time", "s", 1),
    "images_per_second": Quantity("throughput", "images/s", 1),
    "wait_share": Quantity("waiting for input, slowest rank", "%", 1),
    "target_epochs": Quantity("epochs to target"),
    "target_seconds": Quantity("training time to target", "s", 1),
}


@dataclass(frozen=True)
class Estimate:
    """A mean or a difference of means; ``half`` its 95 % interval's width, None of one value."""

    mean: float
    half: float | None
    count: int

    @property
    def is_significant(self) -> bool:
        """Whether the interval leaves out 0. False without an interval."""
        return self.half is not None and abs(self.mean) > self.half


@dataclass(frozen=True)
class Reached:
    """What a group of runs reached, over those that finished, one per seed.

    Attributes:
        group: The group.
        finished: Number of those runs.
        unfinished: Number of the group's other runs by status.
        estimates: Estimate of each quantity that all of them have, by key.
        top1_difference: Last top-1 minus that of the first group; None without one of the two.
        target: Top-1 in percent that the times to target are of; None without one.
        hits: Number of them that reached it.
    """

    group: Group
    finished: int
    unfinished: dict[str, int]
    estimates: dict[str, Estimate]
    top1_difference: Estimate | None
    target: float | None
    hits: int


def quantities(run: Run, target: float | None) -> dict[str, float]:
    """Return what one run has reached so far, by key; without what it has not recorded.

    The epochs and the training time to a target, a top-1 in percent, are those of the first
    evaluation that reached it.
    """
    found: dict[str, float | None] = {}
    if run.val:
        last, best_line = run.val[-1], best(run.val)
        for key in ("top1", "top5", "ema_top1", "loss"):
            found["val_loss" if key == "loss" else key] = number(last.get(key))
        found["best_top1"] = best_line["top1"] if best_line else None
        found["evaluate_seconds"] = sum(column(run.val, "seconds"))
    if run.train:
        seconds = found["train_seconds"] = run.positions.seconds
        found["train_loss"] = number(run.train[-1].get("loss"))
        images = images_in(run.train)
        if seconds and images:
            found["images_per_second"] = images / seconds
            found["wait_share"] = 100 * sum(column(run.train, "wait_seconds")) / seconds
    hit = None if target is None else first_at(run.val, target)
    if hit is not None:
        found["target_epochs"] = hit["epoch"]
        times = run.positions.at([hit["step"]])["seconds"]
        found["target_seconds"] = times[0] if times else None
    found |= {"epochs": run.epoch, "steps": run.step}
    return {key: value for key in QUANTITIES if (value := found.get(key)) is not None}


def target_of(run: Run, target: float | None) -> float | None:
    """The top-1 in percent to measure the way to: ``target``, or the recipe's own if it is None."""
    return number(run.keys.get("target_accuracy")) if target is None else target


def reached(found: Sequence[Group], target: float | None = None) -> list[Reached]:
    """Return what each group reached, over the seeds of its runs that finished.

    Equal seeds are no new sample: the first run of each counts. The target is a top-1 in percent;
    None: that of each recipe, ``target_accuracy``.
    """
    rows: list[Reached] = []
    first: list[float] = []
    for group in found:
        runs = list(group.runs.values())
        of = target_of(runs[0], target)
        finished = [run for run in runs if run.status == "finished"]
        seeds = {run.seed: run for run in reversed(finished) if run.seed is not None}
        counted = [run for run in finished if run.seed is None or seeds[run.seed] is run]
        values = [quantities(run, of) for run in counted]
        keys = [key for key in QUANTITIES if values and all(key in each for each in values)]
        columns = {key: [each[key] for each in values] for key in keys}
        others = [run.status for run in runs if run.status != "finished"]
        top1 = columns.get("top1", [])
        against = difference(top1, first) if top1 and first else None
        first = first if rows else top1
        unfinished: dict[str, int] = {status: others.count(status) for status in others}
        estimates = {key: mean(column) for key, column in columns.items()}
        hits = sum("target_epochs" in each for each in values)
        rows.append(Reached(group, len(values), unfinished, estimates, against, of, hits))
    return rows


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value."""
    found, count = statistics.fmean(values), len(values)
    if count < 2:
        return Estimate(found, None, count)
    half = _quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Estimate(found, half, count)


def difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Return the mean of ``values`` minus that of ``others``, with Welch's interval."""
    found = statistics.fmean(values) - statistics.fmean(others)
    count = min(len(values), len(others))
    if count < 2:
        return Estimate(found, None, count)
    parts = [(statistics.variance(each) / len(each), len(each) - 1) for each in (values, others)]
    total = sum(part for part, _ in parts)
    if not total:
        return Estimate(found, 0.0, count)
    freedom = total**2 / sum(part**2 / free for part, free in parts)
    return Estimate(found, _quantile(freedom) * math.sqrt(total), count)


def _quantile(freedom: float) -> float:
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
