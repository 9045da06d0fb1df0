"""The learning-rate range test: one short run in which the rate rises until the run diverges.

Smith 2017 (arXiv 1506.01186, section 3.3). The rate rises by the same factor in each update, over
several powers of ten, from the weights that the recipe starts from and without its warm-up. The run
is the recipe's own: its batch, accumulation, ranks and precision. It reads training images only and
writes no weights.

benchmarks/results/lr_range.md compares the suggested peak and other rules with tuned rates.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from ...errors import RecipeError
from ...ranks import Job
from ...schema.load import load
from ...training.data import build_sources
from ...training.timeline import timeline_of
from ..precision import make_folder
from ..runs import measure

#: The rates reach from the recipe's over this to the recipe's times this.
REACH = 100.0
#: Numbers of updates: the least that gives a curve, and the default, an epoch within two bounds.
LEAST_STEPS, USUAL_STEPS = 20, (60, 120)
#: The loss is smoothed over this part of the updates.
SMOOTHED_OVER = 0.05
#: The run has diverged where the smoothed loss is this many times that of its first updates. With
#: less, a run may recover: SGD at batch 2,560 on CIFAR-10 rises above its first loss and recovers.
TOLERANCE = 1.5
#: The suggested peak is the diverging rate over this.
MARGIN = 10.0

#: Overrides under which a run only trains, from fresh weights or those of ``init``.
_ONLY = (
    *("evaluate_every=null", "target_accuracy=null", "stages=[]", "ema.decay=null"),
    *("stop_after=null", "resume=false", "log_every=1", "gradient_noise_every=null"),
)
#: Overrides of the schedule. Those that belong to other schedules take their defaults.
_RISING = (
    *("schedule.name=constant", "schedule.warmup_shape=exponential", "schedule.decay=null"),
    *("schedule.decay_from=warmup", "schedule.power=2", "schedule.end=0"),
    *("schedule.milestones=[]", "schedule.factor=0.1", "scale=null"),
)


@dataclass(frozen=True)
class Findings:
    """What a curve of training loss over rising learning rates shows.

    Attributes:
        smoothed: The loss of each update until the run diverged, averaged with those before it.
        lowest_lr: Rate at which the smoothed loss is lowest.
        steepest_lr: Rate at which the smoothed loss falls most per factor of the rate.
        diverging_lr: Rate at which the run diverged; None if it did not.
    """

    smoothed: tuple[float, ...]
    lowest_lr: float
    steepest_lr: float
    diverging_lr: float | None

    @property
    def suggested_lr(self) -> float | None:
        """A peak to start tuning from; None if the run did not diverge."""
        return None if self.diverging_lr is None else self.diverging_lr / MARGIN


@dataclass(frozen=True)
class RangeTest:
    """A learning-rate range test of a recipe.

    Attributes:
        recipe: Name of the recipe.
        optimizer: Name of its optimizer.
        batch_size: Global batch size in images.
        ranks: Number of processes.
        present_lr: The recipe's own peak learning rate.
        lr: Learning rate of each update until the run diverged.
        loss: Mean training loss of each of these updates, over the global batch. The last may not
            be finite.
        findings: What they show.
        epochs: Epochs of training images read, with those of an update after the last.
        seconds: Time that the run took, with its start.
    """

    recipe: str
    optimizer: str
    batch_size: int
    ranks: int
    present_lr: float
    lr: tuple[float, ...]
    loss: tuple[float, ...]
    findings: Findings
    epochs: float
    seconds: float


def range_test(
    recipe: str,
    overrides: Sequence[str],
    job: Job,
    out: Path,
    *,
    lr: tuple[float, float] | None = None,
    steps: int | None = None,
) -> RangeTest:
    """Run the range test of a recipe on the ranks of a job.

    Stages that the recipe begins later do not take part. No file of the run is left.

    Args:
        recipe: Name or path of the recipe.
        overrides: Overrides of the form ``key=value``.
        job: The ranks; all call this together.
        out: Folder in which the run's own files are kept until it ends. It is made if necessary.
        lr: Lowest and highest rate. Default: the recipe's over and times :data:`REACH`.
        steps: Number of updates over the whole range. Default: an epoch, but at least 60 and at
            most 120.

    Raises:
        RecipeError: The range is empty, the updates are too few, or the recipe does not fit the
            data or the machine.
        DataError: The data are missing or cannot be used.
    """
    with job.raise_on_all_ranks():
        if steps is not None and steps < LEAST_STEPS:
            raise RecipeError(
                f"--steps: {steps} updates give no curve; valid: at least {LEAST_STEPS}"
            )
        loaded = load(recipe, [*overrides, *_ONLY])
        own = loaded.recipe
        low, high = _range(own.optimizer.lr, lr)
        if job.is_main:
            make_folder(out)
        images = len(build_sources(own)[0])
        per_epoch = timeline_of(own, images, job.world_size).steps_per_epoch
    count = steps or round(min(max(per_epoch, USUAL_STEPS[0]), USUAL_STEPS[1]))
    rates = [low * (high / low) ** (step / count) for step in range(count)]
    curve = _Curve(count)

    def watch(loss: float) -> str | None:
        if curve.add(loss):
            return "the run has diverged"
        return "all rates have been tried" if len(curve.smoothed) == count else None

    rising = [
        *_RISING,
        f"schedule.warmup={count}",
        f"schedule.start={low!r}",
        f"optimizer.lr={high!r}",
        # One update more than are made: the last one of a run writes its weights.
        f"epochs={(count + 1.5) / per_epoch!r}",
    ]
    run_dir = out / f"range-{job.from_main(uuid4().hex)}"
    try:
        outcome = measure(recipe, [*overrides, *_ONLY, *rising], job, run_dir, watch_training=watch)
    finally:
        if job.is_main:
            shutil.rmtree(run_dir, ignore_errors=True)
    losses = [loss for _, loss in outcome.training[:count]]
    with job.raise_on_all_ranks():
        found = analyse(rates, losses, failed=outcome.status == "diverged")
    made = len(found.smoothed)
    return RangeTest(
        loaded.name,
        own.optimizer.name,
        own.batch_size,
        job.world_size,
        own.optimizer.lr,
        tuple(rates[:made]),
        tuple(losses[:made]),
        found,
        outcome.epochs,
        outcome.seconds,
    )


def _range(own: float, lr: tuple[float, float] | None) -> tuple[float, float]:
    """The lowest and highest rate."""
    if lr is None:
        if own == 0:
            raise RecipeError("optimizer.lr: 0 gives no range of rates; valid: a range by --lr")
        return own / REACH, own * REACH
    low, high = lr
    if not 0 < low < high < math.inf:
        raise RecipeError(
            f"--lr: {low:g}..{high:g} is an empty range; valid: LOW..HIGH with 0 < LOW < HIGH"
        )
    return low, high


def analyse(rates: Sequence[float], losses: Sequence[float], *, failed: bool = False) -> Findings:
    """Find where a rising learning rate helps most and where it diverges.

    The run diverges at the first rate at which its smoothed loss is 1.5 times that of its first
    updates (:data:`TOLERANCE`), so that training has undone all it had learned, or is not finite.

    Args:
        rates: Learning rate of each update over the whole range, ascending by a constant factor.
        losses: Losses of the updates that were made, at most as many.
        failed: Whether the update after those was refused, because gradients were not finite.

    Raises:
        RecipeError: There are too few losses before the run diverged.
    """
    curve = _Curve(len(rates))
    end = next((step for step, loss in enumerate(losses) if curve.add(loss)), None)
    if end is None and failed:
        end = min(len(losses), len(rates) - 1)
    usable = curve.smoothed[:end]
    if len(usable) < 3:
        raise RecipeError(
            f"--lr: the run diverges at once, at {rates[len(usable)]:.3g}; valid: a lower LOW"
        )
    lowest = min(range(len(usable)), key=usable.__getitem__)
    slopes = {i: usable[i + 1] - usable[i - 1] for i in range(1, len(usable) - 1) if i <= lowest}
    steepest = min(slopes, key=slopes.__getitem__, default=lowest)
    return Findings(
        tuple(curve.smoothed),
        lowest_lr=rates[lowest],
        steepest_lr=rates[steepest],
        diverging_lr=None if end is None else rates[end],
    )


class _Curve:
    """The smoothed loss of a run, update by update.

    Args:
        steps: Number of updates over the whole range.
    """

    def __init__(self, steps: int) -> None:
        self.smoothed: list[float] = []
        self._keep = 1 - 1 / max(2.0, SMOOTHED_OVER * steps)
        self._window = max(3, round(SMOOTHED_OVER * steps))
        self._sum = self._first = 0.0

    def add(self, loss: float) -> bool:
        """Add the loss of an update; whether the run has diverged."""
        self._sum = self._keep * self._sum + (1 - self._keep) * loss
        count = len(self.smoothed) + 1
        self.smoothed.append(self._sum / (1 - self._keep**count))  # corrected for starting from 0
        if count <= self._window:
            self._first += loss / self._window
            return not math.isfinite(loss)
        now = self.smoothed[-1]
        return not math.isfinite(now) or now > TOLERANCE * self._first
