"""When a trial should stop before its end: it diverged, it is hopeless, or the time is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..runs import Outcome, Reading
from .trials import State

#: No trial is judged before this part of its run, nor during its warm-up.
FREE = 0.25
#: After this part of its run, a trial that is behind others goes on, as little is left to save.
CLOSING = 0.6
#: A loss of this many times that of guessing means that a run has diverged.
FAR = 3.0
#: From this part of the run on, a loss above that of guessing means that it is hopeless. Before,
#: the running statistics of batch norm may lag behind the weights.
LATE = 0.5


@dataclass(frozen=True)
class Guessing:
    """A model that knows nothing of ``classes`` classes."""

    classes: int

    def is_better(self, reading: Reading, times: float = 1.0) -> bool:
        """Whether it beats a reading: in loss, even ``times`` its own, and nearly in accuracy.

        The accuracy is that of guessing, p, and of a second guess where the first one is wrong,
        p (1 - p): 19 % with 10 classes. A model of few classes that is right more often has
        learned, even if it is so sure of its errors that its loss is above that of guessing.
        """
        p = 1 / self.classes
        return not reading.loss <= times * math.log(self.classes) and reading.top1 < 100 * (
            p + p * (1 - p)
        )


class Watch:
    """Looks at the evaluations of a trial, on rank 0.

    Args:
        report: Notes an evaluation, and returns whether the trial is hopeless beside others.
        guessing: What a trial has to be better than.
        epochs: Length of the trial.
        warmup: Length of its warm-up in epochs.
        deadline: Value of ``time.monotonic()`` at which the trial stops.
    """

    def __init__(
        self,
        report: Callable[[Reading], bool],
        guessing: Guessing,
        *,
        epochs: float,
        warmup: float,
        deadline: float = math.inf,
    ) -> None:
        self._report, self._guessing, self._deadline = report, guessing, deadline
        self._free = max(warmup, FREE * epochs) + 1e-6
        self._late = max(warmup, LATE * epochs) + 1e-6
        self._closing = CLOSING * epochs
        self._times = {"diverged": 0, "pruned": 0}
        self._state: State | None = None

    def __call__(self, reading: Reading) -> str | None:
        """Return why the trial should stop, None if it should go on."""
        behind = self._report(reading)
        for state, since, factor in (("diverged", self._free, FAR), ("pruned", self._late, 1.0)):
            bad = reading.epoch > since and self._guessing.is_better(reading, factor)
            self._times[state] = self._times[state] + 1 if bad else 0
        if self._times["diverged"] >= 2:
            self._state = "diverged"
        elif self._times["pruned"] >= 2 or (behind and self._free < reading.epoch <= self._closing):
            self._state = "pruned"
        elif time.monotonic() > self._deadline:
            self._state = "interrupted"
        return self._state

    def state(self, outcome: Outcome) -> State:
        """How the trial ended."""
        if outcome.status == "stopped" and self._state:
            return self._state
        last = outcome.readings[-1] if outcome.readings else None
        if outcome.status == "diverged" or last is None or not math.isfinite(last.loss):
            return "diverged"
        return "diverged" if self._guessing.is_better(last, FAR) else "finished"
