"""Stages of training with another image size or batch size, from one epoch to another.

Small images first and larger ones later train faster for the same accuracy (Howard 2018, "Training
ImageNet in 18 minutes"; Tan and Le 2021, arXiv:2104.00298, section 3.3); a growing batch takes the
place of a falling learning rate (Smith et al. 2018, arXiv:1711.00489).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import DataError


@dataclass(frozen=True)
class Stage:
    """What is other from an epoch on; None is as before.

    Attributes:
        from_epoch: where it begins, > 0, rounded to whole global batches.
        image_size: pixels on each side.
        batch_size: the global batch.
        micro_batch_size: images per batch of a rank; with another ``batch_size`` and None, as much
            smaller or larger as that is.
    """

    from_epoch: float
    image_size: int | None = None
    batch_size: int | None = None
    micro_batch_size: int | None = None


@dataclass(frozen=True)
class Phase:
    """A stretch of the stream of images with one size of images and batches.

    Attributes:
        start: images of the stream before it.
        image_size: pixels on each side.
        batch_size: the global batch.
        micro_batch_size: images per batch of a rank.
    """

    start: int
    image_size: int
    batch_size: int
    micro_batch_size: int


def lay_out(
    first: Phase, stages: Sequence[Stage], *, images: int, world_size: int
) -> tuple[Phase, ...]:
    """Where in the stream each stage begins: after whole global batches of the one before.

    Args:
        first: how training starts.
        stages: in order.
        images: of an epoch.
        world_size: number of ranks.

    Raises:
        DataError: the stages are not in order, or a batch does not divide.
    """
    phases = [first]
    _check(first, world_size, "")
    epoch = 0.0
    for stage in stages:
        if stage.from_epoch <= epoch:
            raise DataError(
                f"a stage from epoch {stage.from_epoch:g} comes after one from {epoch:g}; "
                "valid: stages in order, each from a later epoch"
            )
        epoch = stage.from_epoch
        last = phases[-1]
        batch_size = stage.batch_size or last.batch_size
        micro = stage.micro_batch_size
        if micro is None:
            micro = max(1, last.micro_batch_size * batch_size // last.batch_size)
        phase = Phase(
            start=end_of(last, epoch, images),
            image_size=stage.image_size or last.image_size,
            batch_size=batch_size,
            micro_batch_size=micro,
        )
        _check(phase, world_size, f" of the stage from epoch {epoch:g}")
        phases.append(phase)
    return tuple(phases)


def until(phases: Sequence[Phase], epochs: float, images: int) -> tuple[tuple[Phase, ...], int]:
    """The phases of a training of ``epochs``, and its end: a place in the stream, after whole
    global batches. A stage that would begin after the end does not begin."""
    begun = tuple(p for p in phases if p.start == 0 or p.start < epochs * images)
    return begun, end_of(begun[-1], epochs, images)


def end_of(phase: Phase, epoch: float, images: int) -> int:
    """The place in the stream nearest to ``epoch`` after whole global batches of ``phase``."""
    batches = round((epoch * images - phase.start) / phase.batch_size)
    return phase.start + max(0, batches) * phase.batch_size


def phase_at(phases: Sequence[Phase], position: int) -> Phase:
    """The phase of the next batch."""
    return next(phase for phase in reversed(phases) if phase.start <= position)


def _check(phase: Phase, world_size: int, where: str) -> None:
    if phase.batch_size % (phase.micro_batch_size * world_size):
        raise DataError(
            f"batch_size {phase.batch_size}{where} is not a multiple of micro_batch_size "
            f"{phase.micro_batch_size} x {world_size} ranks"
        )
