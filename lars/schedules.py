"""Learning-rate schedules: pure functions of the step, composed of a warm-up and a decay.

A schedule maps the number of updates already made to the learning rate of the next one, so a
resumed run needs nothing but its step. Decays start at their peak; :func:`warmup` prepends a
warm-up to any of them, as optax's ``join_schedules`` does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .plain import plain

#: Maps the number of updates already made to the learning rate of the next update.
Schedule = Callable[[int], float]

#: Shapes of :func:`warmup`.
WARMUP_SHAPES = ("linear", "quadratic", "exponential")

#: Published codes that :func:`mlperf_polynomial` follows.
MLPERF_CODES = ("tensorflow", "nvidia")

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
    the decay. With power 2 this is the formula of the MLPerf ResNet-50 submissions, which start
    from 0, so that the first update changes nothing. :func:`mlperf_polynomial` counts steps as
    they do.

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


def mlperf_polynomial(
    peak: float,
    decay_steps: int,
    *,
    warmup_steps: int,
    decay_from: str = "warmup",
    code: str = "tensorflow",
    end: float = 1e-4,
) -> Schedule:
    """Return the MLPerf ResNet-50 schedule, exactly as one of its two published codes counts steps.

    Both warm up linearly from 0 and decay with power 2; they differ by one step in two places:

    - ``"tensorflow"``: the reference, ``PolynomialDecayWithWarmup`` in mlcommons/training,
      image_classification/tensorflow2/lars_util.py. The first update is step 0, so its learning
      rate is 0; the decay takes ``train_steps - warmup_steps + 1`` steps.
    - ``"nvidia"``: ``PolySchedule`` in NVIDIA's MXNet submissions, common/fit.py. MXNet counts an
      update before it asks for the learning rate, so the first update is step 1; the decay takes
      ``iterations - warmup_steps`` steps, and the last update has the learning rate ``end``. (That
      code would rise again afterwards; here the learning rate stays at ``end``.)

    The logged value ``lars_opt_learning_rate_decay_steps`` is ambiguous: the reference logs the
    length of the decay, NVIDIA's code that of the whole schedule, and not all of MLPerf's reference
    points follow either rule (docs/reference/recipes.md).

    Args:
        peak: the base learning rate, at the end of warm-up.
        decay_steps: length of the decay, at least 1.
        warmup_steps: length of the warm-up; the codes use warm-up epochs times steps per epoch.
        decay_from: ``"warmup"``: ``decay_steps`` is the length of the decay, after the warm-up;
            ``"start"``: it is the code's ``train_steps`` or ``iterations``, counted from the start
            of the run, and must be more than ``warmup_steps``.
        code: one of ``MLPERF_CODES``.
        end: the learning rate after the decay.

    Raises:
        ValueError: an argument is out of its range or unknown.
    """
    _one_of("code", code, MLPERF_CODES)
    _one_of("decay_from", decay_from, DECAY_FROM)
    _at_least("warmup_steps", warmup_steps, 0)
    if decay_from == "start":
        _above("decay_steps", decay_steps, warmup_steps)
        decay_steps += (code == "tensorflow") - warmup_steps
    _at_least("decay_steps", decay_steps, 1)
    total_steps = warmup_steps + decay_steps
    schedule = polynomial(peak, total_steps, warmup_steps=warmup_steps, power=2.0, end=end)
    return schedule if code == "tensorflow" else lambda step: schedule(step + 1)


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


class _Scheduler(LRScheduler):
    """Sets each group's learning rate to ``schedule(step)`` times the group's own factor."""

    def __init__(
        self, optimizer: Optimizer, schedule: Schedule, last_step: int, base_lr: float | None
    ) -> None:
        self._schedule = schedule
        _unshare_rates(optimizer)
        for group in optimizer.param_groups:
            group["lr"] = plain(group["lr"])  # of which torch keeps copies
        if last_step >= 0:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        self._base_lr = _base_lr(optimizer) if base_lr is None else base_lr
        self._factors: list[float] = []
        super().__init__(optimizer, last_step)

    def get_lr(self) -> list[float | Tensor]:
        groups = self.optimizer.param_groups
        for group in groups[len(self._factors) :]:  # all at first, later those that were added
            initial = float(group.setdefault("initial_lr", group["lr"]))
            # A new list: the old one may be part of a state dict.
            self._factors = [*self._factors, initial / self._base_lr if self._base_lr else 1.0]
        rate = self._schedule(self.last_epoch)
        return [
            float(rate * factor * group.get("lr_scale", 1.0))
            for group, factor in zip(groups, self._factors, strict=False)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the schedule, which may be a function that cannot be pickled."""
        content = super().state_dict().items()
        return {key: plain(value) for key, value in content if key != "_schedule"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step; also the rates, unless they have changed since the last step here."""
        groups = self.optimizer.param_groups
        own = [float(group["lr"]) for group in groups] == [float(lr) for lr in self._last_lr]
        super().load_state_dict(state_dict)
        if not own:  # they come from the loaded state of the optimizer
            return
        for group, lr in zip(groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def _unshare_rates(optimizer: Optimizer) -> None:
    """Give groups that share a tensor as their rate, but scale it differently, one of their own."""
    default = optimizer.defaults.get("lr")
    if isinstance(default, Tensor):
        optimizer.defaults["lr"] = default.clone()  # of the groups that are added later
    scales: dict[int, Any] = {}
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            scale = (group.get("lr_scale", 1.0), float(group.get("initial_lr", group["lr"])))
            if scales.setdefault(id(group["lr"]), scale) != scale:
                group["lr"] = group["lr"].clone()


def _base_lr(optimizer: Optimizer) -> float:
    """Return the rate in relation to which the groups' rates are scaled."""
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    default = float(optimizer.defaults.get("lr", 0.0))
    return default if default in rates and default > 0 else max(rates)


def as_scheduler(
    optimizer: Optimizer,
    schedule: Schedule,
    *,
    steps_done: int = 0,
    base_lr: float | None = None,
) -> LRScheduler:
    """Return a torch scheduler that sets the learning rate to ``schedule(step)``.

    Call its ``step()`` after each ``optimizer.step()``.

    An optimizer with one learning rate takes ``schedule(step)``, whatever rate it was made with.
    Where groups were made with different rates, the schedule is the rate of those with the
    optimizer's own ``lr`` (of those with the largest rate, if no group has it), and the others keep
    their ratio to it. A group's ``lr_scale``, as timm sets it for layer-wise decay, is one more
    factor. A group that is added later joins at the next ``step()``.

    The state dict holds the step and the ratios, but not the schedule: make the scheduler with the
    same schedule again, then load the optimizer's state and the scheduler's.

    Args:
        optimizer: any torch optimizer.
        schedule: the schedule.
        steps_done: number of updates already made, to start in the middle of a run without a state
            dict. If the optimizer's state was loaded before, its groups hold their initial rates.
        base_lr: the rate that the schedule stands for: a group made with ``lr`` takes
            ``schedule(step) * lr / base_lr``.

    Raises:
        ValueError: ``base_lr`` is not above 0.

    Example with the two learning rates of Barlow Twins::

        groups = split_parameters(model, weight_decay=1e-6)
        for group in groups:
            group["lr"] = 0.2 if group["adapt"] else 0.0048
        optimizer = LARS.like("barlow-twins", groups, lr=0.2)
        scheduler = as_scheduler(optimizer, warmup(cosine(0.2, 9_000), 1_000))
    """
    if base_lr is not None:
        _above("base_lr", base_lr, 0)
    return _Scheduler(optimizer, schedule, steps_done - 1, base_lr)
