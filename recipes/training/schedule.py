"""The learning rate of each step, from a recipe's ``schedule``.

The schedule is a function of the number of images seen. Stages that change the batch therefore do
not change its shape over epochs; they multiply it by a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ...lars import Schedule, Span, constant, cosine, polynomial, step_decay, warmup
from ..errors import RecipeError
from ..schema.recipe import Recipe
from ..schema.sections import Schedule as Section
from ..words import folded, in_full
from .timeline import Timeline


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of a run; all lengths are in steps.

    Attributes:
        schedule: The learning rate by step, from 0.
        warmup_steps: Length of the warm-up.
        decay_steps: Length of a polynomial or cosine decay from the end of warm-up; else 0.
        milestones: Steps of a step decay, from the start of the run.
    """

    schedule: Schedule
    warmup_steps: int
    decay_steps: int
    milestones: tuple[int, ...]


def learning_rates(recipe: Recipe, timeline: Timeline) -> LearningRates:
    """Return the learning rates of a recipe along the timeline of its run.

    Raises:
        RecipeError: a length does not fit into the run, or contradicts another one.
    """
    section, peak = recipe.schedule, recipe.optimizer.lr
    total_steps = timeline.total_steps
    rise = timeline.steps(section.warmup)
    if rise > total_steps:
        raise RecipeError(
            f"schedule.warmup: {_steps_of(section.warmup, timeline)} is longer than the run, "
            f"{recipe.epochs:g} epochs ({total_steps} steps); valid: at most {total_steps} steps. "
            "To run only the start of a schedule, keep epochs and set stop_after"
        )
    begins = timeline.progress(rise)
    decay_steps = 0
    milestones: tuple[int, ...] = ()
    if section.name == "constant":
        then = constant(peak)
    elif section.name == "step":
        milestones = _milestones(section, timeline)
        falls = [timeline.progress(m) - begins for m in milestones]
        then = step_decay(peak, falls, factor=section.factor)
    else:
        decay_steps = total_steps - rise if section.decay is None else _decay(section, timeline)
        # At least 1, so that a warm-up over the whole run still has a peak to rise to.
        length = max(1, timeline.progress(rise + decay_steps) - begins)
        if section.name == "cosine":
            then = cosine(peak, length, end=section.end)
        else:
            then = polynomial(peak, length, power=section.power, end=section.end)
    whole = warmup(then, begins, start=section.start, shape=section.warmup_shape)

    def schedule(step: int) -> float:
        return timeline.factor(step) * whole(timeline.progress(step))

    return LearningRates(schedule, rise, decay_steps, milestones)


def _milestones(section: Section, timeline: Timeline) -> tuple[int, ...]:
    for earlier, later in pairwise((section.warmup, *section.milestones)):
        if timeline.steps(later) <= timeline.steps(earlier):
            raise RecipeError(
                f"schedule.milestones: {_steps_of(later, timeline)} does not come after "
                f"{_steps_of(earlier, timeline)}; valid: ascending, counted from the start of the "
                "run, after the warm-up"
            )
    return tuple(timeline.steps(span) for span in section.milestones)


def _decay(section: Section, timeline: Timeline) -> int:
    """Length of the decay in steps, from the end of warm-up."""
    assert section.decay is not None
    rise = timeline.steps(section.warmup)
    if section.decay_from == "warmup":
        return timeline.steps(section.decay, after=rise)
    left = timeline.steps(section.decay) - rise
    if left < 1:
        raise RecipeError(
            f"schedule.decay: {_steps_of(section.decay, timeline)} from the start of the run is "
            f"not longer than the warm-up, {_steps_of(section.warmup, timeline)}; valid: a longer "
            "one, or schedule.decay_from=warmup"
        )
    return left


def _steps_of(span: Span, timeline: Timeline) -> str:
    """A length as the recipe gives it, with its number of steps."""
    return f"{span} ({timeline.steps(span)} steps)"


def in_words(recipe: Recipe, rates: LearningRates, timeline: Timeline) -> str:
    """Describe a schedule: warm-up, peak, decay and end, in one line.

    For example ``linear warm-up to 24.699 in 31 epochs, power-2 decay to 0.0001 at the end``.

    Args:
        recipe: The recipe.
        rates: Its learning rates.
        timeline: The timeline of its run.
    """
    section, peak = recipe.schedule, f"{recipe.optimizer.lr:g}"
    parts = [f"{peak} from the start"]
    if rates.warmup_steps:
        start = f" from {section.start:g}" if section.start else ""
        length = in_full(section.warmup)
        parts = [f"{section.warmup_shape} warm-up{start} to {peak} in {length}"]
    if section.name == "step":
        epochs = [f"{timeline.epoch(step):.4g}" for step in rates.milestones]
        parts.append(f"times {section.factor:g} at epoch {folded(epochs, 30)}")
    elif section.name == "constant":
        parts.append("then constant")
    else:
        end = rates.warmup_steps + rates.decay_steps
        at = "the end" if end == timeline.total_steps else f"epoch {timeline.epoch(end):.4g}"
        shape = "cosine" if section.name == "cosine" else f"power-{section.power:g}"
        parts.append(f"{shape} decay to {section.end:g} at {at}")
    return ", ".join(parts)
