"""Learning-rate schedules: pure functions of the step, composed of a warm-up and a decay.

A schedule maps the number of updates already made to the learning rate of the next one, so a
resumed run needs nothing but its step. Decays start at their peak; :func:`warmup` prepends a
warm-up to any of them, as optax's ``join_schedules`` does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

#: Maps the number of updates already made to the learning rate of the next update.
Schedule = Callable[[int], float]

#: Shapes of :func:`warmup`.
WARMUP_SHAPES = ("linear", "quadratic", "exponential")

#: Where the length of a decay is counted from: the end of warm-up, or the start of the run.
DECAY_FROM = ("warmup", "start")


def constant(peak: float) -> Schedule:
    """Return a schedule that is always ``peak``.

    Raises:
        ValueError: ``peak`` is negative or NaN.
    """
    _at_least("peak", peak, 0)
    return lambda step: peak


def cosine(peak: float, steps: int, *, end: float = 0.0) -> Schedule:
    """Return a cosine decay from ``peak`` to ``end`` in ``steps`` updates.

    ``lr(s) = end + (peak - end) (1 + cos(pi s / steps)) / 2``, and ``end`` from ``steps`` on
    (Loshchilov & Hutter 2017, SGDR, without restarts).

    Raises:
        ValueError: a learning rate is negative, or ``steps`` is less than 1.
    """
    _at_least("peak", peak, 0)
    _at_least("steps", steps, 1)
    _at_least("end", end, 0)

    def schedule(step: int) -> float:
        if step >= steps:
            return end
        return end + (peak - end) * (1 + math.cos(math.pi * step / steps)) / 2

    return schedule


def step_decay(peak: float, milestones: Sequence[int], *, factor: float = 0.1) -> Schedule:
    """Return a step decay: ``peak``, multiplied by ``factor`` at each milestone.

    Goyal et al. 2017 divide by 10 after 30, 60 and 80 of 90 epochs, counted from the start of
    the run. :func:`warmup` shifts the milestones by its own length, so subtract its steps.

    Args:
        peak: the learning rate before the first milestone.
        milestones: steps, at least 1 and ascending.
        factor: above 0.

    Raises:
        ValueError: an argument is out of its range.
    """
    steps = list(milestones)
    _at_least("peak", peak, 0)
    if steps != sorted({*steps}) or any(step < 1 for step in steps):
        raise ValueError(f"milestones must be ascending and at least 1, not {steps}")
    _above("factor", factor, 0)
    return lambda step: float(peak * factor ** bisect_right(steps, step))


def warmup(then: Schedule, steps: int, *, start: float = 0.0, shape: str = "linear") -> Schedule:
    """Return a warm-up from ``start`` to ``then(0)`` in ``steps`` updates, followed by ``then``.

    With ``x = s / steps`` and ``peak = then(0)``:

    - linear: ``start + (peak - start) x`` (Goyal et al. 2017);
    - quadratic: ``start + (peak - start) x ** 2`` (the LARS authors' nvcaffe, since Nov 2017);
    - exponential: ``start (peak / start) ** x``, a constant factor per step.

    Args:
        then: the schedule that follows; its step 0 is the end of warm-up.
        steps: length of the warm-up; 0 means none.
        start: the learning rate of the first update, if there is a warm-up.
        shape: one of ``WARMUP_SHAPES``.

    Raises:
        ValueError: ``steps`` or ``start`` is negative, the shape is unknown, or an exponential
            warm-up starts from or ends at 0.
    """
    return _joined(_rise(start, then(0), steps, shape), steps, then)


def polynomial(
    peak: float,
    total_steps: int,
    *,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    power: float = 2.0,
    start: float = 0.0,
    end: float = 0.0,
) -> Schedule:
    """Return a linear warm-up from ``start`` to ``peak`` and a polynomial decay to ``end``.

    ``lr(s) = start + (peak - start) s / warmup_steps`` for the first ``warmup_steps`` updates,
    then ``end + (peak - end) (1 - (s - warmup_steps) / decay_steps) ** power``, and ``end`` after
    the decay. With power 2 this is the formula of the MLPerf ResNet-50 codes, whose ``end`` is 1e-4
    and which count steps in two ways. The reference (mlcommons/training, lars_util.py) begins with
    step 0, at rate 0, and decays in ``train_steps - warmup_steps + 1`` steps, so ``total_steps`` is
    ``train_steps + 1``. NVIDIA's submissions (common/fit.py) begin with step 1, ``schedule(s + 1)``
    here, and reach ``end`` in the last of ``total_steps`` updates.

    Args:
        peak: the learning rate at the end of warm-up.
        total_steps: length of the run.
        warmup_steps: length of the warm-up, at most ``total_steps``.
        decay_steps: length of the decay after the warm-up; by default to the end of the run.
        power: exponent of the decay, above 0; 1 is linear.
        start: the learning rate of the first update, if there is a warm-up.
        end: the learning rate after the decay.

    Raises:
        ValueError: a learning rate or a length is negative, ``power`` is not above 0, or the
            warm-up is longer than the run.
    """
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            f"warmup_steps must be between 0 and total_steps ({total_steps}), not {warmup_steps}"
        )
    steps = total_steps - warmup_steps if decay_steps is None else decay_steps
    _at_least("peak", peak, 0)
    _at_least("decay_steps", steps, 0)
    _above("power", power, 0)
    _at_least("end", end, 0)

    def decay(step: int) -> float:
        if step >= steps:
            return end
        return float(end + (peak - end) * (1 - step / steps) ** power)

    # Not warmup(decay, ...): it rises to decay(0), which is `end` if the decay has no steps.
    return _joined(_rise(start, peak, warmup_steps, "linear"), warmup_steps, decay)


def _rise(start: float, peak: float, steps: int, shape: str) -> Schedule:
    _one_of("shape", shape, WARMUP_SHAPES)
    _at_least("start", start, 0)
    _at_least("steps", steps, 0)
    if shape == "linear":
        return lambda step: start + (peak - start) * step / steps
    if shape == "quadratic":
        return lambda step: start + (peak - start) * (step / steps) ** 2
    _above("start of an exponential warm-up", start, 0)
    _above("peak of an exponential warm-up", peak, 0)
    return lambda step: float(start * (peak / start) ** (step / steps))


def _joined(first: Schedule, steps: int, then: Schedule) -> Schedule:
    return lambda step: first(step) if step < steps else then(step - steps)


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # written so that NaN fails too
        raise ValueError(f"{name} must be at least {least}, not {value}")


def _above(name: str, value: float, bound: float) -> None:
    if not value > bound:  # written so that NaN fails too
        raise ValueError(f"{name} must be above {bound}, not {value}")


def _one_of(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}, not {value!r}")
