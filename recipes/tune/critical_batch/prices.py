"""The price of each batch size, from an estimate: epochs to the same loss, updates and speed-up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Literal

import numpy as np

from .fit import CriticalBatch
from .journal import Record
from .result import Estimate

#: Doublings beyond the largest measured batch that are predicted, and up to which the prediction
#: has been checked: on MLPerf's reference points of ResNet-50, it is within 6 % at one doubling,
#: and misses by 12 to 18 % at two and more.
DOUBLINGS, CHECKED = 2, 1

_NEAR = 1.2  # how far from the lengths of its runs the epochs of a batch are said

#: A value with the ends of its interval.
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Measured:
    """Epochs to the target by a batch's own runs: those that ended nearest to it.

    Attributes:
        epochs: The number of epochs; at a bound, the length of its longest or shortest run.
        bound: ``reached`` near the lengths of its runs; ``above``: its longest run is far from the
            target; ``below``: its shortest run is far beyond it; ``diverged``: no run ended.
    """

    epochs: float
    bound: Literal["reached", "above", "below", "diverged"]


@dataclass(frozen=True)
class Price:
    """What a batch size costs.

    Attributes:
        batch_size: Global batch size in images.
        updates_per_epoch: Updates of the weights in an epoch.
        epochs: Epochs to the loss of the target run, by the fit.
        speed_up: How many times faster than the recipe's batch if every GPU were perfect: with
            GPUs in proportion to the batch, an update takes the same time.
        measured: By the batch's own runs; None if it has none.
        doublings: Doublings beyond the largest measured batch; 0 or less is within.
    """

    batch_size: int
    updates_per_epoch: float
    epochs: Interval
    speed_up: Interval
    measured: Measured | None
    doublings: float

    @property
    def updates(self) -> Interval:
        """Updates of the weights to the loss of the target run."""
        value, low, high = (self.updates_per_epoch * number for number in self.epochs)
        return value, low, high


def target_loss(estimate: Estimate) -> float | None:
    """The loss of the target run, by the runs of the smallest batch; None if they do not tell."""
    line = _line(_whole_runs(estimate, min(estimate.batches)))
    return None if line is None else math.exp(line[0] * math.log(estimate.epochs) + line[1])


def prices(estimate: Estimate) -> list[Price]:
    """The prices of the measured batches, and of those up to :data:`DOUBLINGS` beyond them."""
    critical = estimate.critical
    if critical is None:
        return []
    base, own = estimate.base, estimate.base.recipe.batch_size
    largest = critical.largest
    beyond = {largest * 2**power for power in range(1, DOUBLINGS + 1)}
    found = []
    for batch in sorted({*estimate.batches, *(size for size in beyond if size <= base.images)}):
        factor = critical.factor(batch, own)
        scale = batch / own
        epochs = _scaled(critical.factor(batch, min(estimate.batches)), estimate.epochs)
        found.append(
            Price(
                batch,
                base.images / batch,
                epochs,
                (scale / factor[0], scale / factor[2], scale / factor[1]),
                _measured(estimate, batch),
                math.log2(batch / largest),
            )
        )
    return found


def images_to_determine(estimate: Estimate, method: str) -> float | None:
    """Images on which runs of a method would still have to train to determine the critical batch.

    Args:
        estimate: The estimate.
        method: A key of ``methods`` that has a critical batch.

    Returns:
        The number, None if it is unknown.
    """
    critical = estimate.methods[method]
    assert isinstance(critical, CriticalBatch)
    more = critical.more()
    branches = method == "branches"
    trained = sum(
        r.trained for r in estimate.records if r.kind == "run" and (r.run.after > 0) == branches
    )
    return None if more is None else (more - 1) * trained * estimate.base.images


def _measured(estimate: Estimate, batch: int) -> Measured | None:
    of_batch = [r for r in estimate.records if r.run.batch_size == batch and r.kind == "run"]
    runs = [r for r in _finished(of_batch) if not r.run.after]
    if not runs:
        return Measured(0.0, "diverged") if of_batch and not _finished(of_batch) else None
    # The slope of the loss is that of the smallest batch: at equal loss, the law says, it is equal.
    target, line = target_loss(estimate), _line(_whole_runs(estimate, min(estimate.batches)))
    if target is None or line is None:
        return None
    by_length: dict[float, list[float]] = {}
    for r in runs:
        epochs = r.trained * (target / r.loss) ** (1 / line[0])
        by_length.setdefault(r.run.epochs, []).append(epochs)
    if batch == min(estimate.batches):  # its lengths lie around the target
        found = [epochs for same in by_length.values() for epochs in same]
    else:
        _, found = min(by_length.items(), key=lambda item: abs(math.log(fmean(item[1]) / item[0])))
    epochs = geometric_mean(found)
    longest, shortest = max(r.trained for r in runs), min(r.trained for r in runs)
    if epochs > _NEAR * longest:
        return Measured(longest, "above")
    if epochs < shortest / _NEAR:
        return Measured(shortest, "below")
    return Measured(epochs, "reached")


def _whole_runs(estimate: Estimate, batch: int) -> list[Record]:
    return [r for r in estimate.whole if r.run.batch_size == batch and r.loss > 0]


def _finished(records: Iterable[Record]) -> list[Record]:
    return [r for r in records if r.status == "finished" and r.loss > 0]


def _line(runs: Sequence[Record]) -> tuple[float, float] | None:
    """Slope and height of log loss over log epochs; None if it does not fall."""
    by_length: dict[float, list[float]] = {}
    for record in runs:
        by_length.setdefault(record.trained, []).append(math.log(record.loss))
    if len(by_length) < 2:
        return None
    slope, height = np.polyfit(
        np.log(list(by_length)), [fmean(values) for values in by_length.values()], 1
    )
    return (float(slope), float(height)) if slope < 0 else None


def _scaled(interval: Interval, by: float) -> Interval:
    value, low, high = interval
    return value * by, low * by, high * by
