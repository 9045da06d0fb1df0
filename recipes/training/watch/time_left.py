"""How long a run still takes, from what its images, evaluations and checkpoints took so far.

What is still to come is counted by the run's timeline, in images: a step of a later stage may have
another number of images, of another size. What it takes is the median of the recent readings of
this process. The first reading of each stage does not count, as libraries choose kernels and
compile in it, unless it holds :data:`TOLD_AFTER` steps and there is no other yet. On a GPU, what an
evaluation or a checkpoint took has the steps that were still queued before it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median

from ....lars import Span
from ...words import clock, count, duration, listed
from ..callbacks import RunContext

#: Number of readings, and of evaluations and checkpoints, whose median counts.
READINGS, OTHERS = 15, 5
#: Throughput of evaluation relative to training, until the first evaluation: a backward pass
#: multiplies by the weights twice, a forward pass once.
EVALUATION_SPEED = 3.0
#: Steps of this process after which the time left is told in a line of its own.
TOLD_AFTER = 20


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


class TimeLeft:
    """Estimates how long a run still takes, up to its last checkpoint.

    The estimate is for a run that goes on to its last step: it may reach its target accuracy
    before. Until the first evaluation, that takes as long as its forward passes should, and until
    the first checkpoint, that takes no time.

    Args:
        run: The run, with ``step`` steps already made.
    """

    def __init__(self, run: RunContext) -> None:
        self._recipe, self._timeline, self._last = run.recipe, run.timeline, run.last_step
        self._val_images = len(run.val_loader.source) if run.val_loader else 0
        self._first = self._read = run.step  # step of the last reading
        self._told = False
        self._begun: set[int] = set()  # phases in which a reading has ended
        # Seconds for each image in the readings of a phase.
        self._images: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=READINGS))
        self._slow_start: dict[int, float] = {}  # of a long first reading of a phase
        self._evaluations: deque[float] = deque(maxlen=OTHERS)
        self._checkpoints: deque[float] = deque(maxlen=OTHERS)
        self._evaluated = self._saved = -1

    def trained(self, step: int, images: float, seconds: float) -> None:
        """Note a reading at ``step``: the images since the last one, and the time they took."""
        first, last = (self._timeline.phase_index(s) for s in (self._read, step - 1))
        steps, self._read = step - self._read, step
        if first == last and last in self._begun:
            self._images[last].append(seconds / images)
        elif first == last and steps >= TOLD_AFTER:
            self._slow_start[last] = seconds / images
        self._begun.add(last)

    def evaluated(self, step: int, seconds: float) -> None:
        """Note that an evaluation at ``step`` took some time."""
        self._evaluated = step
        self._evaluations.append(seconds)

    def saved(self, step: int, seconds: float) -> None:
        """Note that a checkpoint of ``step`` took some time."""
        self._saved = step
        self._checkpoints.append(seconds)

    def ahead(self, step: int) -> Ahead:
        """Count what the run has still to do after ``step`` steps.

        An evaluation or a checkpoint that is due after ``step`` steps is still to come unless it
        has been noted.
        """
        starts = [phase.start for phase in self._timeline.phases]
        here, end = (self._timeline.position(s) for s in (step, self._last))
        images = tuple(
            max(0, min(stop, end) - max(start, here))
            for start, stop in zip(starts, [*starts[1:], end], strict=True)
        )

        def times(every: Span | None, done: int) -> int:
            if done >= self._last:
                return 0
            after, until = max(step - 1, done), self._last - 1
            return 1 + (self._timeline.times_due(every, after, until) if every else 0)

        recipe = self._recipe
        evaluations = times(recipe.evaluate_every, self._evaluated) if self._val_images else 0
        checkpoints = times(recipe.checkpoint.every, self._saved)
        if recipe.checkpoint.keep_best:
            checkpoints = max(checkpoints, evaluations)
        return Ahead(images, evaluations, checkpoints)

    def seconds(self, step: int) -> float | None:
        """Return the time that the run still takes after ``step`` steps, in seconds.

        None where it cannot be told: until the second reading, or a first one of many steps.
        """
        measured = self._slow_start | {phase: median(of) for phase, of in self._images.items()}
        if not measured:
            return None
        recipe, phases, latest = self._recipe, self._timeline.phases, max(measured)

        def rate(phase: int) -> float:
            """Seconds for each image of a phase; in proportion to the pixels where not measured."""
            known = phase if phase in measured else latest
            pixels = (phases[phase].image_size / phases[known].image_size) ** 2
            return measured[known] * pixels

        if self._evaluations:
            evaluation = median(self._evaluations)
        else:
            pixels = (recipe.eval_size / phases[latest].image_size) ** 2
            weights = 1 if recipe.ema.decay is None else 2
            evaluation = rate(latest) / EVALUATION_SPEED * pixels * self._val_images * weights
        checkpoint = median(self._checkpoints) if self._checkpoints else 0.0
        left = self.ahead(step)
        training = sum(images * rate(phase) for phase, images in enumerate(left.images))
        return training + left.evaluations * evaluation + left.checkpoints * checkpoint

    def announcement(self, step: int, now: float) -> str | None:
        """Return the line that says how long the run still takes; None but for one time.

        For example ``time left: about 72 min, until 14:20, for 2,400 steps, 8 evaluations and 3
        checkpoints``. It comes at the first reading after :data:`TOLD_AFTER` steps of this process
        at which the time left is known.

        Args:
            step: Number of steps made.
            now: The present time, in seconds since 1970; the end is shown in local time.
        """
        seconds = self.seconds(step)
        too_early = self._told or step - self._first < TOLD_AFTER
        if too_early or seconds is None or step >= self._last:
            return None
        self._told = True
        left = self.ahead(step)
        parts = [count(self._last - step, "step")]
        if left.evaluations:
            parts.append(count(left.evaluations, "evaluation"))
        untimed = ""
        if self._checkpoints:
            parts.append(count(left.checkpoints, "checkpoint"))
        elif left.checkpoints:
            untimed = f", not counting {count(left.checkpoints, 'checkpoint')}"
        target = self._recipe.target_accuracy
        sooner = "" if target is None else f", or sooner, at {target:g} % top-1"
        end = clock(now + seconds, now)
        return (
            f"time left: about {duration(seconds)}, until {end}, for {listed(parts)}"
            f"{untimed}{sooner}"
        )
