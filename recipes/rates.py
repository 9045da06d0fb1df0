"""From a recipe's schedule to the learning rate of each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from ..lars import Schedule, Span, constant, cosine, polynomial, step_decay, warmup
from .errors import RecipeError
from .schema import Recipe
from .schema import Schedule as Section


@dataclass(frozen=True)
class Rates:
    """The learning rates of a run. Lengths are in steps.

    Attributes:
        schedule: the learning rate by step.
        warmup_steps: of the warm-up.
        decay_steps: of a polynomial or cosine decay, from the end of warm-up; else 0.
        milestones: of a step decay, from the start of the run.
    """

    schedule: Schedule
    warmup_steps: int
    decay_steps: int
    milestones: tuple[int, ...]


def rates(recipe: Recipe, steps_per_epoch: float, total_steps: int) -> Rates:
    """The learning rates of a run of ``total_steps`` updates.

    Raises:
        RecipeError: lengths that do not fit the run, or one another.
    """
    section, peak = recipe.schedule, recipe.optimizer.lr

    def steps(span: Span) -> int:
        return span.steps(steps_per_epoch, total_steps)

    rise = steps(section.warmup)
    if rise > total_steps:
        raise RecipeError(
            f"schedule.warmup: {_told(section.warmup, steps)} is longer than the run, "
            f"{recipe.epochs:g} epochs ({total_steps} steps); to run only the start of a "
            "schedule, leave epochs and set stop_after"
        )
    decay_steps = 0
    milestones: tuple[int, ...] = ()
    if section.name == "constant":
        then = constant(peak)
    elif section.name == "step":
        milestones = _milestones(section, steps)
        then = step_decay(peak, [m - rise for m in milestones], factor=section.factor)
    else:
        decay_steps = total_steps - rise if section.decay is None else _decay(section, steps)
        # At least one, so that a warm-up that takes the whole run still has a peak to rise to.
        length = max(1, decay_steps)
        if section.name == "cosine":
            then = cosine(peak, length, end=section.end)
        else:
            then = polynomial(peak, length, power=section.power, end=section.end)
    schedule = warmup(then, rise, start=section.start, shape=section.warmup_shape)
    return Rates(schedule, rise, decay_steps, milestones)


def _milestones(section: Section, steps: Callable[[Span], int]) -> tuple[int, ...]:
    for earlier, later in pairwise((section.warmup, *section.milestones)):
        if steps(later) <= steps(earlier):
            raise RecipeError(
                f"schedule.milestones: {_told(later, steps)} does not come after "
                f"{_told(earlier, steps)}; valid: ascending, from the start of the run and past "
                "the warm-up"
            )
    return tuple(steps(span) for span in section.milestones)


def _decay(section: Section, steps: Callable[[Span], int]) -> int:
    """The length of the decay itself, from the end of warm-up."""
    assert section.decay is not None
    if section.decay_from == "warmup":
        return steps(section.decay)
    left = steps(section.decay) - steps(section.warmup)
    if left < 1:
        raise RecipeError(
            f"schedule.decay: {_told(section.decay, steps)} from the start of the run is not "
            f"longer than the warm-up, {_told(section.warmup, steps)}; valid: a longer one, or "
            "schedule.decay_from=warmup"
        )
    return left


def _told(span: Span, steps: Callable[[Span], int]) -> str:
    return f"{span} ({steps(span)} steps)"
