"""Where the wall time of a run goes, and how long it will still take.

A stopwatch with one hand: all time between two of its hooks goes to one part, so the parts always
add up to the time since the start. It never waits for a device. On a GPU, steps are queued ahead,
and a step's time shows up where the meters are next read, which belongs to training too; the pace
of steps is therefore taken from a reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from .callbacks import Callback, Metrics, RunContext
from .estimate import EVALUATION_SPEED, Pace, in_words, work_left

#: The parts of a run's wall time, in the order in which they are shown.
PARTS = ("training", "evaluation", "checkpoints", "start_up", "rest")

#: The parts of training that lines of metrics may hold, in the order in which they are shown.
PHASES = (
    *("wait_seconds", "copy_seconds", "forward_seconds", "backward_seconds"),
    *("all_reduce_seconds", "optimizer_seconds"),
)

#: The first steps are slower than others: their pace is not counted.
SKIPPED_STEPS = 5
#: The time that is left is told at the first reading after this many steps.
STEPS = 20


class RunClock(Callback):
    """Measures the parts of a run's wall time on rank 0, and tells the time that is left once.

    It should be the last of a run's callbacks, so that the time of the others counts where it is
    spent.

    Args:
        before: Seconds of the start-up that had passed when the clock was made.
        clock: Returns the present time in seconds, of any origin.
        now: Returns the present time in seconds since 1970.
    """

    def __init__(
        self,
        before: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._now = clock, now
        self._last = clock()
        self._spent = {**dict.fromkeys(PARTS, 0.0), "start_up": before}
        self._phases: dict[str, float] = {}
        self._times = {"evaluation": 0, "checkpoints": 0}
        self._first_wait = 0.0
        self._steps = 0
        self._from: tuple[int, float] | None = None  # steps, and seconds of training until then
        self._told = False
        self._run: RunContext | None = None

    def on_start(self, run: RunContext) -> None:
        self._run = run
        self._lap("start_up")

    def on_step_begin(self, step: int) -> None:
        self._lap("rest" if self._steps else "start_up")

    def on_step_end(self, step: int) -> None:
        self._lap("training")
        self._steps += 1
        if self._steps == SKIPPED_STEPS:
            self._mark()

    def on_log(self, metrics: Metrics) -> None:
        if metrics.split == "val":
            self._lap("evaluation", counts=True)
            return
        self._lap("training")  # with the wait for the device
        if not self._phases and (waits := metrics.per_step.get("step_wait_seconds")):
            self._first_wait = waits[0]
        for name in PHASES:
            if name in metrics.values:
                self._phases[name] = self._phases.get(name, 0.0) + metrics.values[name]
        if SKIPPED_STEPS <= self._steps < 2 * SKIPPED_STEPS:
            self._mark()  # better than the mark of a step, as the device has nothing left to do
        elif self._steps >= STEPS and not self._told:
            self._tell(metrics.step)

    def on_histograms(self, name: str, step: int, epoch: float, values: dict[str, Tensor]) -> None:
        self._lap("rest")

    def on_evaluation_begin(self, step: int) -> None:
        self._lap("rest")

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._lap("checkpoints", counts=True)

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

    def _lap(self, part: str, *, counts: bool = False) -> None:
        now = self._clock()
        self._spent[part] += now - self._last
        self._last = now
        if counts:
            self._times[part] += 1

    def _mark(self) -> None:
        self._from = self._steps, self._spent["training"]

    def _tell(self, step: int) -> None:
        self._told = True
        run = self._run
        assert run is not None  # the trainer has started the callbacks
        if self._from is None or step >= run.last_step:
            return
        steps, seconds = self._from
        each = (self._spent["training"] - seconds) / (self._steps - steps)
        pace = Pace(each, self._evaluation_seconds(run, each), self._mean("checkpoints"))
        evaluates = run.val_loader is not None
        work = work_left(run.recipe, run.timeline, step, run.last_step, evaluates=evaluates)
        target = run.recipe.target_accuracy
        sooner = "" if target is None else f", or sooner, at {target:g} % top-1"
        run.say(f"time left: {in_words(work, pace, self._now())}{sooner}")

    def _evaluation_seconds(self, run: RunContext, step_seconds: float) -> float | None:
        """That of an evaluation as measured, else from the speed of training."""
        if run.val_loader is None:
            return None
        images_per_second = run.loader.batch_size / step_seconds
        assumed = len(run.val_loader.source) / (EVALUATION_SPEED * images_per_second)
        return self._mean("evaluation") or assumed

    def _mean(self, part: str) -> float | None:
        times = self._times[part]
        return self._spent[part] / times if times else None

    def facts(self) -> dict[str, Any]:
        """Return what a run's files hold of this, in seconds."""
        spent = {name: round(seconds, 3) for name, seconds in self.spent().items()}
        total = round(sum(spent.values()), 3)
        return {
            "time_spent": {**spent, "total": total},
            "training_time": self.phases(),
            "first_wait_seconds": round(self._first_wait, 3),
        }
