"""Stages of training with another image size or batch size, and where each of them begins.

Small images first and larger ones later train faster for the same accuracy (Howard 2018, "Training
ImageNet in 18 minutes"; Tan and Le 2021, arXiv:2104.00298, section 3.3); growing the batch can
replace decaying the learning rate (Smith et al. 2018, arXiv:1711.00489).

A run is laid out once, as a :class:`StageTimeline`. The loader iterates by it, and everything else
that counts the steps, images or epochs of that run asks the same object.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from .errors import DataError


@dataclass(frozen=True)
class Stage:
    """Settings that change at an epoch; None leaves one unchanged."""

    from_epoch: float  #: Epoch at which it begins, above 0, rounded to whole global batches.
    image_size: int | None = None  #: Pixels on each side.
    batch_size: int | None = None  #: Images per global batch.
    micro_batch_size: int | None = None  #: Images of one rank; None scales it with batch_size.


@dataclass(frozen=True)
class Phase:
    """A stretch of the stream of training images with one image size and one batch size."""

    start: int  #: Number of images in the stream before this phase.
    image_size: int  #: Pixels on each side.
    batch_size: int  #: Images per global batch.
    micro_batch_size: int  #: Images per batch of one rank.

    def accumulation(self, world_size: int) -> int:
        """Number of micro-batches of a rank in each global batch."""
        return self.batch_size // (self.micro_batch_size * world_size)


@dataclass(frozen=True)
class StageTimeline:
    """The phases of a run, with the conversions between its steps, images and epochs.

    A step is one optimizer update on one global batch. Past the end of the run the last phase
    continues. Made by :func:`lay_out`.
    """

    images: int  #: Number of images in an epoch.
    world_size: int  #: Number of ranks.
    phases: tuple[Phase, ...]  #: In order; the first one starts at image 0.
    end: int | None  #: Number of images in the whole run; None if it never ends.

    def then(self, stage: Stage) -> StageTimeline:
        """Return this timeline followed by ``stage``.

        Raises:
            DataError: the global batch of the stage does not divide among the ranks.
        """
        last = self.phases[-1]
        batch_size = stage.batch_size or last.batch_size
        micro = stage.micro_batch_size
        if micro is None:
            micro = max(1, last.micro_batch_size * batch_size // last.batch_size)
        start = self._nearest_start(last, stage.from_epoch)
        phase = Phase(start, stage.image_size or last.image_size, batch_size, micro)
        _check_divides(phase, self.world_size, f" of the stage from epoch {stage.from_epoch:g}")
        return replace(self, phases=(*self.phases, phase))

    def until(self, epochs: float) -> StageTimeline:
        """Return this timeline, ended after ``epochs``, rounded to whole global batches.

        A stage that would begin after the end is left out.
        """
        begun = tuple(p for p in self.phases if p.start == 0 or p.start < epochs * self.images)
        return replace(self, phases=begun, end=self._nearest_start(begun[-1], epochs))

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps in an epoch, with the batch size of the first phase."""
        return self.images / self.phases[0].batch_size

    @cached_property
    def total_steps(self) -> int:
        """Number of steps in the whole run.

        Raises:
            ValueError: the run never ends.
        """
        if self.end is None:
            raise ValueError("a run without an end has no number of steps")
        last = self.phases[-1]
        return self.first_steps[-1] + (self.end - last.start) // last.batch_size

    @cached_property
    def first_steps(self) -> tuple[int, ...]:
        """Number of steps before each phase."""
        steps = [0]
        for phase, following in zip(self.phases, self.phases[1:], strict=False):
            steps.append(steps[-1] + (following.start - phase.start) // phase.batch_size)
        return tuple(steps)

    def phase_index(self, step: int) -> int:
        """Index into :attr:`phases` of the step that follows the first ``step`` steps."""
        return max(0, bisect_right(self.first_steps, step) - 1)

    def batch_size(self, step: int) -> int:
        """Global batch size of the step that follows the first ``step`` steps."""
        return self.phases[self.phase_index(step)].batch_size

    def position(self, step: int) -> int:
        """Number of images in the first ``step`` steps."""
        index = self.phase_index(step)
        phase = self.phases[index]
        return phase.start + (step - self.first_steps[index]) * phase.batch_size

    def epoch(self, step: int) -> float:
        """Number of epochs in the first ``step`` steps."""
        return self.epochs(self.position(step))

    def epochs(self, position: int) -> float:
        """Number of epochs in the first ``position`` images."""
        return position / self.images

    def phase_at(self, position: int) -> Phase:
        """The phase of the batch that follows the first ``position`` images."""
        return next(phase for phase in reversed(self.phases) if phase.start <= position)

    def _nearest_start(self, phase: Phase, epoch: float) -> int:
        """The end of a whole global batch of ``phase`` that is nearest to ``epoch``, in images."""
        batches = round((epoch * self.images - phase.start) / phase.batch_size)
        return phase.start + max(0, batches) * phase.batch_size


def lay_out(
    first: Phase,
    stages: Iterable[Stage] = (),
    *,
    images: int,
    world_size: int = 1,
    epochs: float | None = None,
) -> StageTimeline:
    """Lay out a run: each stage begins after whole global batches of the one before it.

    Args:
        first: Settings that training starts with.
        stages: In order.
        images: Number of images in an epoch.
        world_size: Number of ranks.
        epochs: Length of the run, rounded to whole global batches; None never ends.

    Raises:
        DataError: the stages are not in order, or a global batch does not divide among the ranks.
    """
    _check_divides(first, world_size, "")
    timeline = StageTimeline(images, world_size, (first,), None)
    epoch = 0.0
    for stage in stages:
        if stage.from_epoch <= epoch:
            raise DataError(
                f"a stage from epoch {stage.from_epoch:g} comes after one from {epoch:g}; "
                "valid: stages in order, each from a later epoch"
            )
        epoch = stage.from_epoch
        timeline = timeline.then(stage)
    return timeline if epochs is None else timeline.until(epochs)


def check_made_for(timeline: StageTimeline, images: int, world_size: int, batch_size: int) -> None:
    """Check that ``timeline`` was made for this data, number of ranks and first global batch."""
    for key, value, own in (
        ("images", timeline.images, images),
        ("world_size", timeline.world_size, world_size),
        ("batch_size", timeline.phases[0].batch_size, batch_size),
    ):
        if value != own:
            raise DataError(f"timeline: was made for {key} {value}; valid here: {own}")


def _check_divides(phase: Phase, world_size: int, where: str) -> None:
    if phase.batch_size % (phase.micro_batch_size * world_size):
        raise DataError(
            f"batch_size {phase.batch_size}{where} is not a multiple of micro_batch_size "
            f"{phase.micro_batch_size} x {world_size} ranks"
        )
