"""Learning-rate schedules: pure functions of the step, and their spans.

A schedule maps the number of updates already made to the learning rate of the next one, so a
resumed run needs nothing but its step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Schedule = Callable[[int], float]

_SPAN = re.compile(r"(?P<value>\d+(\.\d*)?|\.\d+)(?P<unit>ep|dur|)")


@dataclass(frozen=True)
class Span:
    """A length of training: ``Span.parse("31ep")``, ``"500"`` (steps) or ``"0.1dur"``.

    Attributes:
        value: >= 0; a whole number for steps, at most 1 for fractions of the duration.
        unit: ``"ep"`` (epochs), ``""`` (steps) or ``"dur"`` (fractions of the whole run).
    """

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str | int | Span) -> Span:
        """Read a span.

        Raises:
            ValueError: it is not of the form; the message says what would be.
        """
        if isinstance(text, Span):
            return text
        match = _SPAN.fullmatch(str(text).strip())
        unit = match["unit"] if match else None
        value = float(match["value"]) if match else 0.0
        if unit is None or (unit == "" and value % 1) or (unit == "dur" and value > 1):
            raise ValueError(
                f"{text!r} is not a length: write epochs as '5ep', steps as '500', "
                "a fraction of the run as '0.1dur'"
            )
        return cls(value, unit)

    def steps(self, steps_per_epoch: float, total_steps: int) -> int:
        """Its length in optimizer steps, rounded to the nearest."""
        per_unit = {"ep": steps_per_epoch, "dur": float(total_steps), "": 1.0}
        return round(self.value * per_unit[self.unit])

    def __str__(self) -> str:
        return f"{Decimal(repr(self.value)).normalize():f}{self.unit}"


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
    """Linear warm-up from ``start`` to ``peak``, then polynomial decay to ``end``.

    ``lr(s) = start + (peak - start) s / warmup_steps`` for the first ``warmup_steps`` updates,
    then ``end + (peak - end) (1 - (s - warmup_steps) / decay_steps) ** power``, and ``end`` from
    there on. It is the schedule of the MLPerf ResNet-50 submissions (NVIDIA's ``PolySchedule``,
    power 2), which start from 0: the first update then changes nothing.

    Args:
        peak: the learning rate at the end of warm-up.
        total_steps: of the run.
        warmup_steps: at most ``total_steps``.
        decay_steps: counted from the end of warm-up; by default to the end of the run.
        power: 1 is linear.
        start: the learning rate of the first update, if there is a warm-up.
        end: the learning rate when the decay is over.
    """
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warm-up of {warmup_steps} steps does not fit {total_steps} steps")
    if decay_steps is None:
        decay_steps = total_steps - warmup_steps

    def schedule(step: int) -> float:
        if step < warmup_steps:
            return start + (peak - start) * step / warmup_steps
        done = step - warmup_steps
        if done >= decay_steps:
            return end
        return float(end + (peak - end) * (1 - done / decay_steps) ** power)

    return schedule


class _Scheduler(LRScheduler):
    def __init__(self, optimizer: Optimizer, schedule: Schedule, last_step: int) -> None:
        self._schedule = schedule
        if last_step >= 0:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_step)

    def get_lr(self) -> list[float | Tensor]:
        return [self._schedule(self.last_epoch) for _ in self.base_lrs]


def as_scheduler(optimizer: Optimizer, schedule: Schedule, *, steps_done: int = 0) -> LRScheduler:
    """A torch scheduler that sets every group's learning rate to ``schedule(step)``.

    Call its ``step()`` after each ``optimizer.step()``. ``steps_done`` starts it in the middle.
    """
    return _Scheduler(optimizer, schedule, steps_done - 1)
