"""How long a run still takes, from what its images, evaluations and checkpoints took so far.

What is still to come is counted by the run's timeline, in images: a step of a later stage may have
another number of images, of another size. What it takes is the median of the recent readings of
this process. The first reading of each stage does not count, as libraries choose kernels and
compile in it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median

from ...lars import Span
from ..schema.recipe import Recipe
from .timeline import Timeline

#: Number of readings, and of evaluations and checkpoints, whose median counts.
READINGS, OTHERS = 15, 5
#: Time of a forward pass as a share of a forward and a backward pass, which multiplies by the
#: weights twice: until the first evaluation.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Ahead:
    """What a run has still to do.

    Attributes:
        images: Number of training images of each phase of the timeline.
        evaluations: Number of evaluations.
        checkpoints: Number of checkpoints. Where the best one is kept too, as many as evaluations
            at least.
    """

    images: tuple[int, ...]
    evaluations: int
    checkpoints: int


def ahead(
    recipe: Recipe,
    timeline: Timeline,
    step: int,
    *,
    evaluates: bool,
    evaluated: int = -1,
    saved: int = -1,
) -> Ahead:
    """Count what a run has still to do after some steps.

    Args:
        recipe: The recipe.
        timeline: The stages of the run.
        step: Number of steps made.
        evaluates: Whether the run evaluates anything.
        evaluated: Step of the last evaluation. One that is due after ``step`` steps is still to
            come unless it is this.
        saved: Step of the last checkpoint, likewise.
    """
    last = timeline.last_step(recipe)
    starts, end = [phase.start for phase in timeline.phases], timeline.position(last)
    here = timeline.position(step)
    images = [
        max(0, min(stop, end) - max(start, here))
        for start, stop in zip(starts, [*starts[1:], end], strict=True)
    ]

    def times(every: Span | None, done: int) -> int:
        if done >= last:
            return 0
        after = max(step - 1, done)
        return 1 + (timeline.times_due(every, after, last - 1) if every else 0)  # and at the end

    evaluations = times(recipe.evaluate_every, evaluated) if evaluates else 0
    checkpoints = times(recipe.checkpoint.every, saved)
    if recipe.checkpoint.keep_best:
        checkpoints = max(checkpoints, evaluations)
    return Ahead(tuple(images), evaluations, checkpoints)


class TimeLeft:
    """Estimates how long a run still takes, up to its last checkpoint.

    The estimate is for a run that goes on to its last step: it may reach its target accuracy
    before. Until the first evaluation, that takes as long as its forward passes should, and until
    the first checkpoint, that takes no time.

    Args:
        recipe: The recipe.
        timeline: The stages of the run.
        val_images: Number of images that an evaluation takes; 0: the run evaluates nothing.
        step: Number of steps already made.
    """

    def __init__(self, recipe: Recipe, timeline: Timeline, val_images: int, step: int = 0) -> None:
        self._recipe, self._timeline, self._val_images = recipe, timeline, val_images
        self._read = step  # step of the last reading
        self._begun: set[int] = set()  # phases in which a reading has ended
        # Seconds for each image in the readings of a phase.
        self._images: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=READINGS))
        self._evaluations: deque[float] = deque(maxlen=OTHERS)
        self._checkpoints: deque[float] = deque(maxlen=OTHERS)
        self._evaluated = self._saved = -1

    def trained(self, step: int, images: float, seconds: float) -> None:
        """Note a reading at ``step``: the images since the last one, and the time they took."""
        first, last = (self._timeline.phase_index(s) for s in (self._read, step - 1))
        self._read = step
        if first == last and last in self._begun:
            self._images[last].append(seconds / images)
        self._begun.add(last)

    def evaluated(self, step: int, seconds: float) -> None:
        """Note that an evaluation at ``step`` took some time."""
        self._evaluated = step
        self._evaluations.append(seconds)

    def saved(self, step: int, seconds: float) -> None:
        """Note that a checkpoint of ``step`` took some time."""
        self._saved = step
        self._checkpoints.append(seconds)

    def seconds(self, step: int) -> float | None:
        """Return the time that the run still takes after ``step`` steps, in seconds.

        None where it cannot be told: until the second reading.
        """
        if not self._images:
            return None
        recipe, phases = self._recipe, self._timeline.phases
        latest = max(self._images)
        rates = []
        for number, phase in enumerate(phases):
            known = number if number in self._images else latest
            pixels = (phase.image_size / phases[known].image_size) ** 2
            rates.append(median(self._images[known]) * pixels)
        if self._evaluations:
            evaluation = median(self._evaluations)
        else:
            pixels = (recipe.eval_size / phases[latest].image_size) ** 2
            weights = 1 if recipe.ema.decay is None else 2
            evaluation = FORWARD * rates[latest] * pixels * self._val_images * weights
        checkpoint = median(self._checkpoints) if self._checkpoints else 0.0
        left = ahead(
            recipe,
            self._timeline,
            step,
            evaluates=self._val_images > 0,
            evaluated=self._evaluated,
            saved=self._saved,
        )
        training = sum(images * rate for images, rate in zip(left.images, rates, strict=True))
        return training + left.evaluations * evaluation + left.checkpoints * checkpoint


def in_short(seconds: float) -> str:
    """A time in at most six characters up to 99 days: ``45s``, ``6m05s``, ``14h05m``, ``3d04h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"
