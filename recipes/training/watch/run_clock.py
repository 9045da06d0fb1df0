"""Where the wall time of a run goes.

A stopwatch with one hand: all time between two of its hooks goes to one part, so the parts always
add up to the time since the start. It never waits for a device. On a GPU, steps are queued ahead,
and a step's time shows up where the device is next waited for: where the meters are read, which is
training too, or in an evaluation or a checkpoint that comes before that and counts it as its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..callbacks import Callback, Metrics, RunContext

#: The parts of a run's wall time, in the order in which they are shown.
PARTS = ("training", "evaluation", "checkpoints", "start_up", "rest")

#: The parts of training that lines of metrics may hold, in the order in which they are shown.
PHASES = (
    *("input_seconds", "copy_seconds", "forward_seconds", "backward_seconds"),
    *("all_reduce_seconds", "optimizer_seconds"),
)


class RunClock(Callback):
    """Measures the parts of a run's wall time on rank 0.

    It should be the last of a run's callbacks, so that the time of the others counts where it is
    spent.

    Args:
        before: Seconds of the start-up that had passed when the clock was made.
        clock: Returns the present time in seconds, of any origin.
    """

    def __init__(self, before: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last = clock()
        self._spent = {**dict.fromkeys(PARTS, 0.0), "start_up": before}
        self._phases: dict[str, float] = {}
        self._first_wait = 0.0
        self._stepped = False

    def on_start(self, run: RunContext) -> None:
        self._lap("start_up")

    def on_step_begin(self, step: int) -> None:
        self._lap("rest" if self._stepped else "start_up")

    def on_step_end(self, step: int) -> None:
        self._lap("training")
        self._stepped = True

    def on_log(self, metrics: Metrics) -> None:
        if metrics.split == "val":
            self._lap("evaluation")
            return
        self._lap("training")  # with the wait for the device
        if not self._phases and (waits := metrics.per_step.get("step_wait_seconds")):
            self._first_wait = waits[0]
        for name in PHASES:
            if name in metrics.values:
                self._phases[name] = self._phases.get(name, 0.0) + metrics.values[name]

    def on_histograms(self, name: str, step: int, epoch: float, values: dict[str, Tensor]) -> None:
        self._lap("rest")

    def on_evaluation_begin(self, step: int) -> None:
        self._lap("rest")

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._lap("checkpoints")

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context manager whose body, in a hook of a step, is no part of training."""
        self._lap("training")
        yield
        self._lap("rest")

    def spent(self) -> dict[str, float]:
        """Return the seconds since the start by :data:`PARTS`.

        Their sum is the time since the clock was made, and what passed before.
        """
        self._lap("rest")
        return dict(self._spent)

    def phases(self) -> dict[str, float]:
        """Return the seconds of the parts of training that were logged, by :data:`PHASES`."""
        return {name: round(self._phases[name], 3) for name in PHASES if name in self._phases}

    @property
    def first_wait_seconds(self) -> float:
        """How long the first step waited for its input, which started up meanwhile."""
        return self._first_wait

    def _lap(self, part: str) -> None:
        now = self._clock()
        self._spent[part] += now - self._last
        self._last = now

    def facts(self) -> dict[str, Any]:
        """Return what a run's files hold of this, in seconds."""
        spent = {name: round(seconds, 3) for name, seconds in self.spent().items()}
        total = round(sum(spent.values()), 3)
        return {
            "time_spent": {**spent, "total": total},
            "training_time": self.phases(),
            "first_wait_seconds": round(self._first_wait, 3),
        }
