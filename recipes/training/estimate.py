"""The time that a run has left, from the steps that it has made, and times as text."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise

from ...lars import Span
from ..schema.recipe import Recipe
from .timeline import Timeline
from .wording import count, listed

#: Throughput of evaluation relative to training: a forward pass is a third of the operations.
EVALUATION_SPEED = 3.0


@dataclass(frozen=True)
class Work:
    """What a run has left to do.

    Attributes:
        steps: Steps of training.
        evaluations: Evaluations.
        checkpoints: Checkpoints, without those of ``checkpoint.keep_best``.
    """

    steps: int
    evaluations: int
    checkpoints: int


def work_left(
    recipe: Recipe, timeline: Timeline, step: int, last_step: int, *, evaluates: bool
) -> Work:
    """Return what is left after a step, whose own evaluation and checkpoint are still to come.

    Args:
        recipe: The recipe.
        timeline: Steps and images of the whole run.
        step: Number of steps made, at least 1.
        last_step: Step after which the run stops, unless it reaches its target before.
        evaluates: Whether there are images for evaluation.
    """

    def times(every: Span | None) -> int:
        """The steps from ``step`` on at which something is due, and the last one."""
        if every is None:
            return 1
        return 1 + _times_due(timeline, every, step - 1, last_step - 1)

    evaluations = times(recipe.evaluate_every) if evaluates and recipe.evaluate_every else 0
    return Work(last_step - step, evaluations, times(recipe.checkpoint.every))


def _times_due(timeline: Timeline, every: Span, after: int, until: int) -> int:
    """In how many of the steps from ``after + 1`` to ``until`` :meth:`Timeline.due` is true."""

    def multiples(step: int) -> int:
        if not every.unit:
            return math.floor(step / every.value + 1e-9)
        whole = timeline.images if every.unit == "ep" else timeline.end
        return math.floor(timeline.position(step) / (every.value * whole) + 1e-9)

    # In a stage either no step passes several multiples, which count once, or each passes one.
    inside = (step for step in timeline.first_steps if after < step < until)
    bounds = pairwise([after, *inside, max(after, until)])
    return sum(min(multiples(end) - multiples(start), end - start) for start, end in bounds)


@dataclass(frozen=True)
class Pace:
    """How long the parts of a run take, in seconds; None where that is not known.

    Attributes:
        step: A step of training.
        evaluation: An evaluation.
        checkpoint: A checkpoint.
    """

    step: float
    evaluation: float | None = None
    checkpoint: float | None = None


def seconds_left(work: Work, pace: Pace) -> float:
    """Return the seconds that a run has left; what is not known counts nothing."""
    return (
        work.steps * pace.step
        + work.evaluations * (pace.evaluation or 0.0)
        + work.checkpoints * (pace.checkpoint or 0.0)
    )


def in_words(work: Work, pace: Pace, now: float) -> str:
    """Say how long a run still takes, and until when.

    For example ``about 72 min, until 14:20: 2,400 steps (1.8 s each), 8 evaluations and 3
    checkpoints``.

    Args:
        work: What is left.
        pace: How long its parts take.
        now: The present time, in seconds since 1970; the end is shown in local time.
    """
    seconds = seconds_left(work, pace)
    parts = {
        "evaluation": (work.evaluations, pace.evaluation),
        "checkpoint": (work.checkpoints, pace.checkpoint),
    }
    known = [f"{count(work.steps, 'step')} ({step_time(pace.step)} each)"]
    known += [count(n, name) for name, (n, each) in parts.items() if n and each is not None]
    others = [count(n, name) for name, (n, each) in parts.items() if n and each is None]
    without = f", without {listed(others)}" if others else ""
    end = clock(now + seconds, now)
    return f"about {duration(seconds)}, until {end}: {listed(known)}{without}"


def duration(seconds: float) -> str:
    """A time as text: ``45 s``, ``6.6 min``, ``14 h 05 min`` or ``3 d 04 h``."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.1f} min" if seconds < 600 else f"{seconds / 60:.0f} min"
    minutes = round(seconds / 60)
    if minutes < 72 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24:02d} h"


def step_time(seconds: float) -> str:
    """The time of a step as text, with two significant digits: ``38 ms``, ``1.8 s``, ``12 s``."""
    if seconds < 0.0995:
        return f"{1e3 * seconds:.2g} ms"
    return f"{seconds:.2g} s" if seconds < 99.5 else duration(seconds)


def clock(when: float, now: float) -> str:
    """A time to come as text, in local time: ``14:20``, with the date unless that is today's.

    Args:
        when: The time, in seconds since 1970.
        now: The present time.
    """
    local, today = time.localtime(when), time.localtime(now)
    same_day = (local.tm_year, local.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M" if same_day else "%Y-%m-%d %H:%M", local)
