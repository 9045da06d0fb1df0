"""The search for a recipe's peak learning rate and warm-up, from coarse to fine.

As in Jia et al. 2018 (arXiv 1807.11205, section 3.1: "coarse-to-fine tuning"), short trials find
where good settings are, and longer ones decide among them. Every trial is the recipe's own
training, scored on training images that are held out.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import RecipeError
from ...output import writing
from ...ranks import Job
from ...schema.load import load
from ...training.data import build_sources
from ...training.folder.lock import locked
from ...training.folder.names import CHECKPOINTS
from ...training.timeline import timeline_of
from ..trial import Outcome, Reading, held_out, measure
from . import report
from .budget import Cost, Plan, describe, holds_coarse, plan
from .line import WORST, best_place, next_place, rate_at
from .result import Found, Line, State, Tried, best_of
from .space import Settings, first_settings, lowest_peak, space_of, trial_overrides
from .study import Study

#: Held-out images are evaluated after each of these shares of a trial.
EVALUATE_EVERY = 0.25
#: Updates of the run that measures the time of a step.
TIMED_UPDATES = 5


@dataclass
class Search:
    """A search on the ranks of a job, which resumes what is in ``out``; its study is on rank 0."""

    recipe: str
    overrides: Sequence[str]  # for every trial
    job: Job
    out: Path
    lr: tuple[float, float] | None = None  # range of the peak
    minutes: float = 30.0  # budget of this call
    runs: float | None = None  # budget of the whole study instead, in runs of the recipe
    say: Callable[[str], None] = print  # is given a line for each trial on rank 0

    def __post_init__(self) -> None:
        for name, limit in (("minutes", self.minutes), ("runs", self.runs)):
            if limit is not None and not 0 < limit < math.inf:
                raise RecipeError(f"--{name}: {limit:g} is no budget; valid: a number above 0")
        self._began = time.monotonic()
        self._late: list[float] = []  # how much longer trials of this call took than expected
        if not self.job.is_main:
            self.say = lambda line: None

    def run(self) -> Found:
        """Find the best settings; the best so far are written after each trial. Collective."""
        with ExitStack() as stack:
            with self.job.raise_on_all_ranks():
                self._prepare()
                if self.job.is_main:
                    self._open(stack)
            return self._search()

    def _prepare(self) -> None:
        """Check what was asked for, before anything is written."""
        asked = load(self.recipe, self.overrides).recipe
        if asked.resume.from_:
            raise RecipeError("resume: trials start anew; valid here: resume=false")
        self._held_out = held_out(asked)
        hold_out = f"data.holdout={self._held_out}"
        # Without what a trial cannot have, or what its settings replace.
        dropped = ("scale", "run_dir", "evaluate_every")
        self._asked = [o for o in self.overrides if o.partition("=")[0].strip() not in dropped]
        self._base = [*self._asked, hold_out]
        # With the user's `scale`, from which the rates start.
        self._full = load(self.recipe, [*self.overrides, hold_out]).recipe
        images = len(build_sources(self._full)[0])
        self._timeline = timeline_of(self._full, images, self.job.world_size)
        self._space = space_of(self._full, self._timeline, self.lr)
        self._first = first_settings(self._full, self._timeline, self._space)
        load(self.recipe, self._overrides(self._first[-1], 1.0))

    def _open(self, stack: ExitStack) -> None:
        """Open the study on rank 0, which alone may write into the folder from now on."""
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(self.out, self.say))
            self._study = Study(self.out, self._full, self._space)

    def _search(self) -> Found:
        """Make trials until the budget is used up or no trial is left to make."""
        self._plan_trials()
        while True:
            with self.job.raise_on_all_ranks():
                own = self._next() if self.job.is_main else None
            trial = self.job.gather(own)[0]
            if trial is None:
                break
            self._make(trial)
        with self.job.raise_on_all_ranks():
            if self.job.is_main and not self._write():
                rate, number = self._space["lr"], len(self._study.trials())
                raise RecipeError(
                    f"--lr: all {number} trials, from {rate.low:g} to {rate.high:g}, diverged; "
                    "valid: a range of lower rates"
                )
        found = self.job.gather(self._found() if self.job.is_main else None)[0]
        assert found is not None
        return found

    def _plan_trials(self) -> None:
        """Fit the lengths of trials to the budget; those of a study that goes on stay."""
        own = self._study.note("plan") if self.job.is_main else None
        known: dict[str, dict[str, Any]] | None = self.job.gather(own)[0]
        budget = 60 * self.minutes if self.runs is None else self.runs
        cost, spent = Cost(0.0, 1.0, "runs"), 0.0
        if self.runs is None and known is not None and known["cost"]["unit"] == "seconds":
            cost = Cost(**known["cost"])
        elif self.runs is None:
            cost = self._timed()
            spent = self.job.gather(time.monotonic() - self._began)[0]  # one plan for all ranks
        with self.job.raise_on_all_ranks():
            planned = plan(budget, cost, self._timeline.total_steps, spent)
            if known is not None:
                planned = Plan(**known["plan"])
            elif self.job.is_main:
                self._study.set_note("plan", {"plan": asdict(planned), "cost": asdict(cost)})
        self._budget, self._cost, self._plan = budget, cost, planned
        self.say(describe(planned, cost, budget - spent, self._full.epochs))

    def _timed(self) -> Cost:
        """What a trial takes, by a few updates at the lowest rate and an evaluation."""
        # A run of one update first imports what no later one has to.
        self.say(f"timing {TIMED_UPDATES} updates and an evaluation, to see which trials fit")
        total, folder = self._timeline.total_steps, self.out / "trials" / "timed"
        lowest = self._first[0]._replace(lr=self._space["lr"].low)
        often = ("log_every=1", "evaluate_every=1dur")
        for updates, keys in ((1, ("evaluate_every=null",)), (TIMED_UPDATES, often)):
            given = self._overrides(lowest, min(1.0, (updates + 0.01) / total))
            try:
                outcome = measure(self.recipe, [*given, *keys], self.job, folder)
            finally:
                if self.job.is_main:
                    shutil.rmtree(folder, ignore_errors=True)
            self._ended(outcome)
        step, once = outcome.step_seconds, outcome.evaluation_seconds
        start = outcome.seconds - outcome.readings[-1].step * step - once
        return Cost(max(0.0, start) + once / EVALUATE_EVERY, step * total, "seconds")

    def _ended(self, outcome: Outcome) -> None:
        """End if a signal came during a run."""
        if outcome.signal:
            raise SystemExit(128 + outcome.signal)

    def _overrides(self, settings: Settings, share: float) -> list[str]:
        return [
            *self._base,
            *trial_overrides(self._full, self._timeline, settings, share),
            f"evaluate_every={EVALUATE_EVERY}dur",
        ]

    def _next(self) -> Tried | None:
        """Begin the next trial on rank 0; None if none fits into the budget, or none is left."""
        trials = self._study.trials()
        if self._cost.unit == "runs":
            left = self._budget - sum(t.epochs for t in trials) / self._full.epochs
        else:
            left = self._budget - (time.monotonic() - self._began)
            left /= statistics.median(self._late or [1.0])
        number = sum(t.stage == "coarse" and t.counts for t in trials)
        begun = any(t.stage == "fine" for t in trials)
        if not begun and holds_coarse(number, left, self._plan, self._cost):
            return self._study.begin_coarse(self._first)
        centre, line = self._line(trials)
        if centre is None or self._cost.of(self._plan.fine) > left + 1e-9:
            return None
        lowest, highest = self.lr or (lowest_peak(self._full), math.inf)
        scores = {at: t.score for at, t in line.items()}
        place, seed = next_place(scores, centre.lr, lowest, highest)
        if (place, seed) in line:
            return None
        settings = centre.settings._replace(lr=rate_at(centre.lr, place))
        return self._study.begin_fine(settings, place, seed)

    def _line(self, trials: Sequence[Tried]) -> tuple[Tried | None, Line]:
        """The best coarse trial, and the line around it, on which it is if it is as long."""
        centre = best_of(t for t in trials if t.stage == "coarse")
        alike = self._plan.coarse == self._plan.fine and centre and centre.state == "finished"
        own = {(0, 0): centre} if centre and alike else {}
        fine = (t for t in trials if t.stage == "fine" and t.counts)
        return centre, {**own, **{(t.place, t.seed): t for t in fine}}

    def _make(self, tried: Tried) -> None:
        """Make a trial on all ranks, and note how it ended."""
        share = self._plan.coarse if tried.stage == "coarse" else self._plan.fine
        overrides = self._overrides(tried.settings, share)
        overrides.append(f"seed={self._full.seed + tried.seed}")
        folder = self.out / "trials" / f"{tried.stage}-{tried.number:03d}"
        is_main = self.job.is_main
        stopped: list[State] = []

        def watch(reading: Reading) -> str | None:
            if self._study.report(reading):
                stopped.append("pruned")
            elif self._cost.unit == "seconds" and time.monotonic() > self._began + self._budget:
                stopped.append("out of time")
            return stopped[-1] if stopped else None

        try:
            outcome = measure(self.recipe, overrides, self.job, folder, watch if is_main else None)
        except BaseException:
            if is_main:
                with suppress(Exception):
                    self._study.tell("interrupted")
                    if self._write():
                        best = f"{self.out / report.RECIPE} has the best settings so far"
                        self.say(f"interrupted: {best}; the same command goes on from here")
            raise
        finally:
            if is_main:
                shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        with self.job.raise_on_all_ranks():
            if is_main:
                state = _state(outcome, stopped)
                ended = self._study.tell(state, epochs=outcome.epochs, seconds=outcome.seconds)
                self.say(report.describe(ended))
                self._write()
                if state == "finished":
                    self._late.append(outcome.seconds / max(1e-9, self._cost.of(share)))
        self._ended(outcome)

    def _found(self) -> Found | None:
        """The best so far; None if there is nothing, or all diverged."""
        trials = self._study.trials()
        best, line = self._line(trials)
        scores = {at: t.score for at, t in line.items()}
        if any(score > WORST for score in scores.values()):
            best = line[best_place(scores), 0]
        if best is None:
            return None
        return Found(
            recipe=self.recipe,
            overrides=tuple(self._asked),
            best=best,
            best_overrides=tuple(trial_overrides(self._full, self._timeline, best.settings)),
            trials=tuple(trials),
            line=line,
            space=self._space,
            epochs=self._full.epochs,
            held_out=self._held_out,
            folder=self.out,
        )

    def _write(self) -> bool:
        """Write the best so far; whether there is any."""
        found = self._found()
        if found:
            report.write(found)
        return found is not None


def _state(outcome: Outcome, stopped: Sequence[State]) -> State:
    """How a trial ended that could be stopped for the given reasons."""
    last = outcome.readings[-1] if outcome.readings else None
    if outcome.status == "diverged" or last is None or not math.isfinite(last.loss):
        return "diverged"
    return stopped[-1] if outcome.status == "stopped" and stopped else "finished"
