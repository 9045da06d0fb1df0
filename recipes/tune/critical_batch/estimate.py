"""Make the runs of an estimate within a time limit, and fit the epochs of a batch to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....amp import auto_precision
from ...errors import RecipeError
from ...ranks import Job
from ...schema.load import Loaded
from .base import FEWEST_UPDATES, Base
from .fit import CriticalBatch, fit_losses
from .runs import Record, Run, length_of, make, record_of, runs_of

# Runs are repeated with other seeds while the time lasts, until the interval is narrow. One seed
# can make it narrow by chance: on small data sets, single losses spread by a tenth.
_FEWEST_SEEDS, _MOST_SEEDS = 2, 8
_NARROW = 1.25  # ratio of the interval's ends: 4 times the largest batch is then known within 10 %

#: A value with the ends of its interval.
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Row:
    """What a global batch size needs to reach the loss of the target run, by the fit."""

    batch_size: int
    epochs: Interval
    updates: float
    #: How many times faster than the recipe's batch if every GPU were perfect: with GPUs in
    #: proportion to the batch, an update takes the same time.
    speed_up: Interval
    doublings: float  # beyond the largest measured batch; 0 or less is within


@dataclass(frozen=True)
class Estimate:
    """What the runs say about the epochs that a batch needs."""

    base: Base
    epochs: float  # of the target run, the smallest batch
    batches: tuple[int, ...]  # that were to be measured
    records: tuple[Record, ...]  # of the runs that ended
    left_out: int  # runs for which the time did not suffice
    critical: CriticalBatch | None  # None if the runs do not tell it
    why: str = ""  # they do not

    def rows(self) -> list[Row]:
        """A row for each measured batch, and for one doubling beyond the largest."""
        critical, images, own = self.critical, self.base.images, self.base.recipe.batch_size
        if critical is None:
            return []
        # MLPerf's reference points of ResNet-50 are predicted within 7 % at one doubling, but miss
        # by 12 to 18 % at two and more.
        beyond = {2 * critical.largest} if 2 * critical.largest <= images else set()
        rows = []
        for batch in sorted({*self.batches, *beyond}):
            value, low, high = critical.factor(batch, min(self.batches))
            epochs = (value * self.epochs, low * self.epochs, high * self.epochs)
            value, low, high = critical.factor(batch, own)
            speed_up = (batch / own / value, batch / own / high, batch / own / low)
            doublings = math.log2(batch / critical.largest)
            rows.append(Row(batch, epochs, epochs[0] * images / batch, speed_up, doublings))
        return rows


def estimate(
    loaded: Loaded,
    job: Job,
    out: Path,
    *,
    batches: Sequence[int] = (),
    epochs: float | None = None,
    rule: str | None = None,
    minutes: float = 15.0,
    say: Callable[[str], None] = lambda line: None,
) -> Estimate:
    """Estimate the epochs that a larger batch needs, in a folder that may have runs; collective."""
    length = epochs or loaded.recipe.epochs
    with job.raise_on_all_ranks():
        base = Base.of(loaded, out, job.world_size, rule)
        chosen = base.checked(batches or base.default_batches())
        updates = length * base.images / chosen[-1]
        if updates < FEWEST_UPDATES:
            raise RecipeError(
                f"--epochs: {length:.3g} are too few for a batch of {chosen[-1]}, which makes "
                f"{updates:.0f} updates in its shortest run where {FEWEST_UPDATES} are needed; "
                f"valid: at least {length * FEWEST_UPDATES / updates:.3g} epochs, or "
                "smaller --batches"
            )
        base = base.of_runs(chosen, length)
        if base.recipe.precision == "auto":  # the same if another machine goes on
            base = base.changed(precision=auto_precision(job.device.type))
    runner = Runner(base, job, minutes, say)
    runner.use(base)
    return runner.estimate(chosen, length)


class Runner:
    """Makes runs as long as the time lasts, in the folder of an estimate, on all ranks together."""

    def __init__(self, base: Base, job: Job, minutes: float, say: Callable[[str], None]) -> None:
        self.base, self.job, self.minutes = base, job, minutes
        self.records: list[Record] = []
        self.left_out = 0
        self._say = say if job.is_main else lambda line: None
        self._start = time.monotonic()

    def estimate(self, batches: tuple[int, ...], epochs: float) -> Estimate:
        """Make the runs, and repeat them while the time lasts and the interval is wide."""
        seed, smallest = self.base.recipe.seed, min(batches)
        lengths = dict.fromkeys(batches, epochs)
        if self.make_all(runs_of(lengths, seed, first=True)):
            first = self._fit(self.records)
            lengths = {batch: epochs * _expected(first, batch, batches) for batch in batches}
            for repeat in range(_MOST_SEEDS):
                trained = {r.run.batch_size for r in _finished(self.records)}
                runs = [r for r in runs_of(lengths, seed + repeat) if r.batch_size in trained]
                # Nothing may be left to compare the smallest batch with.
                if {run.batch_size for run in runs} <= {smallest} or not self.make_all(runs):
                    break
                found = self._fit(near_the_target(self.records, lengths))
                narrow = not isinstance(found, str) and found.high <= _NARROW * found.low
                if repeat + 1 >= _FEWEST_SEEDS and narrow:
                    break
        found = self._fit(near_the_target(self.records, lengths))
        fitted = (None, found) if isinstance(found, str) else (found, "")
        return Estimate(self.base, epochs, batches, tuple(self.records), self.left_out, *fitted)

    def make_all(self, runs: Sequence[Run]) -> bool:
        """Make those runs that have not been made; False once the time does not suffice."""
        for index, run in enumerate(runs):
            if any(record.run == run for record in self.records):
                continue
            record = record_of(self.base, run, self.job, self.base.out / run.name)
            if record is None:
                if not self._affords(run.epochs):
                    self.left_out += len(runs) - index
                    return False
                record = self._make(run)
            self.records.append(record)
        return True

    def use(self, base: Base) -> None:
        """Take this base for the runs that follow, and write its recipe."""
        self.base = base
        with self.job.raise_on_all_ranks():
            if self.job.is_main:
                base.write()

    def _make(self, run: Run) -> Record:
        start = time.monotonic()
        record = make(self.base, run, self.job, self.base.out / run.name)
        result = "diverged"
        if record.status == "finished":
            loss = self.base.floor + record.loss
            result = f"training loss {loss:.4f}, held-out top-1 {record.top1:.2f} %"
        self._say(f"{run}: {result} ({time.monotonic() - start:.0f} s)")
        return record

    def _affords(self, epochs: float) -> bool:
        """Whether the time suffices for so many epochs, at the speed so far."""
        trained = sum(record.trained for record in self.records)
        speed = sum(record.seconds for record in self.records) / trained if trained else 0.0
        passed = self.job.all_reduce_max(time.monotonic() - self._start)[0]
        return passed + speed * epochs <= 60 * self.minutes

    def _fit(self, records: Sequence[Record]) -> CriticalBatch | str:
        """The critical batch by these runs, or why they do not tell it."""
        seen = [(r.run.batch_size, r.trained, r.loss) for r in _finished(records)]
        try:
            return fit_losses(seen, self.base.rule)
        except RecipeError as error:
            return str(error)


def near_the_target(records: Sequence[Record], lengths: dict[int, float]) -> list[Record]:
    """The runs to fit: a batch's first ones until those of its length in ``lengths`` finish."""
    # The critical batch grows while the loss falls: runs that end near the target say most.
    finished, smallest = _finished(records), min(lengths)
    is_near = {r.run: r.run.epochs == length_of(lengths[r.run.batch_size]) for r in finished}
    known = {run.batch_size for run, near in is_near.items() if near and run.batch_size > smallest}
    return [r for r in finished if is_near[r.run] or r.run.batch_size not in known]


def _finished(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r.status == "finished" and r.loss > 0]


def _expected(found: CriticalBatch | str, batch: int, batches: Sequence[int]) -> float:
    """Epochs of a batch in those of the smallest, by a first fit or without one."""
    if isinstance(found, CriticalBatch):
        return found.factor(batch, min(batches))[0]
    return (max(batches) + batch) / (max(batches) + min(batches))
