"""Make the runs of an estimate within a budget, and fit the price of a batch to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import AgreedError, RecipeError
from ...ranks import Job
from ...schema.load import Loaded
from .branches import (
    LENGTHS,
    POINTS,
    branch_overrides,
    check_branches,
    plan_branches,
    trunk_overrides,
)
from .fit import CriticalBatch, fit_losses
from .journal import Journal, Record
from .observations import branches, near_the_target, whole_runs
from .one_run import make_run
from .result import Estimate
from .runs import AROUND, FEWEST_UPDATES, Base, Run, first_runs, further_runs, rounded_down
from .side_by_side import make_side_by_side

METHODS = ("runs", "branches", "both")

# Runs are repeated with other seeds while the budget lasts, until the interval is narrow. One seed
# can make it narrow by chance: on small data sets, single losses spread by a tenth.
_FEWEST_SEEDS, _MOST_SEEDS = 2, 8
_NARROW = 1.25  # ratio of the interval's ends: 4 times the largest batch is then known within 10 %
_PROBE = 10  # updates, at least, of the run that measures the speed


@dataclass(frozen=True)
class Budget:
    """What the runs may cost in all, over all calls that share a folder.

    Attributes:
        minutes: Time of the runs; None: any.
        epochs: Epochs of training; None: any.
    """

    minutes: float | None = None
    epochs: float | None = None


def estimate(
    loaded: Loaded,
    job: Job,
    out: Path,
    *,
    batches: Sequence[int] = (),
    epochs: float | None = None,
    rule: str | None = None,
    budget: Budget | None = None,
    method: str = "runs",
    workers: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Estimate:
    """Estimate the price of a batch on the ranks of a job; collective.

    Args:
        loaded: The recipe.
        job: The ranks.
        out: Folder for the recipe and the journal of the runs. One that holds finished runs of the
            same recipe is continued.
        batches: Batch sizes to measure; default: three around the recipe's own.
        epochs: Length of the target run, the smallest batch; default: the recipe's, or as long as
            the budget allows.
        rule: How the learning rate follows the batch: ``linear`` or ``sqrt``; default: linear for
            sgd, else sqrt.
        budget: What the runs may cost; default: 15 minutes.
        method: Which runs to make: one of :data:`METHODS`.
        workers: Number of whole runs to make side by side on this machine, in processes of their
            own that share its cores. Only for a job of one rank.
        say: Is given a line about each run, on rank 0.

    Raises:
        RecipeError, DataError: The recipe, the data or the options do not allow an estimate, or the
            budget does not suffice for one.
    """
    budget = budget or Budget(minutes=15.0)
    with job.raise_on_all_ranks():
        if workers > 1 and job.world_size > 1:
            raise RecipeError(
                f"--workers: {workers} runs side by side do not go with {job.world_size} ranks; "
                "valid: 1"
            )
        base = Base.of(loaded, out, job.world_size, rule)
        if batches:
            base.check_batches(batches)
        if method != "runs":
            check_branches(base)
    journal = Journal(base, job)
    runner = Runner(base, job, journal, budget, workers, say)
    return runner.estimate(tuple(batches), epochs, method)


class Runner:
    """Makes runs as long as the budget lasts."""

    def __init__(
        self,
        base: Base,
        job: Job,
        journal: Journal,
        budget: Budget,
        workers: int,
        say: Callable[[str], None],
    ) -> None:
        self.base, self.job, self.journal = base, job, journal
        self.budget, self.workers = budget, workers
        self.say = say if job.is_main else lambda line: None
        self.left_out: list[Run] = []

    def estimate(self, batches: tuple[int, ...], epochs: float | None, method: str) -> Estimate:
        try:
            epochs, batches = self._choose(epochs, batches, method)
        except RecipeError as error:  # on all ranks, which choose alike
            raise AgreedError(str(error)) from None
        methods: dict[str, CriticalBatch | str] = {}
        if method != "branches":
            methods["whole runs"] = self._compare_whole_runs(batches, epochs)
        if method != "runs":
            self._branch(batches, epochs)
            trunks = [r.status for r in self.journal.records if r.kind == "trunk"]
            diverged = "the recipe's own run diverges" if "diverged" in trunks else None
            methods["branches"] = diverged or self._fit(whole=False)
        return Estimate(
            self.base,
            epochs,
            batches,
            tuple(self.journal.records),
            tuple(near_the_target(self.journal)),
            tuple(self.left_out),
            methods,
            self.journal.seconds,
        )

    def _compare_whole_runs(self, batches: Sequence[int], epochs: float) -> CriticalBatch | str:
        """Make the runs, and repeat them while the budget lasts and the interval is wide."""
        base, smallest = self.base, min(batches)
        if not self.make_all(first_runs(base, batches, epochs)):
            return self._fit(whole=True)
        known = self.journal.choices.get("prices", {})
        if not {*map(str, batches)} <= known.keys():
            found = self._fit(whole=True)
            known = {str(batch): _expected(found, batch, smallest, batches) for batch in batches}
            self.journal.choose(prices=known)
        found = self._fit(whole=True)
        for repeat in range(_MOST_SEEDS):
            runs = further_runs(base, batches, epochs, lambda batch: known[str(batch)], repeat)
            runs = [run for run in runs if not self._diverges(run.batch_size)]
            if {run.batch_size for run in runs} <= {smallest}:
                break  # nothing is left to compare it with
            done = self.make_all(runs)
            found = self._fit(whole=True)
            if not done or (repeat + 1 >= _FEWEST_SEEDS and _is_narrow(found)):
                break
        return found

    def _diverges(self, batch: int) -> bool:
        """Whether all runs of a batch size diverged so far."""
        seen = [
            r.status
            for r in self.journal.records
            if r.run.batch_size == batch and r.kind == "run" and not r.run.after
        ]
        return bool(seen) and "finished" not in seen

    def _choose(
        self, epochs: float | None, batches: tuple[int, ...], method: str
    ) -> tuple[float, tuple[int, ...]]:
        """The length of the target run and the batch sizes: given, as before, or chosen now."""
        known, base = self.journal.choices, self.base
        batches = batches or tuple(known.get("batches", ()))
        length = epochs or known.get("epochs")
        if length is None:
            most = base.recipe.epochs
            tried = base.check_batches(batches or base.default_batches(most))
            allowed = self._allowed_epochs()
            length = min(most, rounded_down(allowed / self._price(tried, method)))
        shortest = 1.0 if method == "runs" else min(LENGTHS)
        measured = base.check_batches(batches or base.default_batches(length * shortest))
        updates = base.updates(measured, length * shortest)
        if updates < FEWEST_UPDATES:
            needed = length * FEWEST_UPDATES / updates
            price = self._price(measured, method) * needed
            limit = f"time for {price:.3g} epochs in all" if epochs is None else "longer runs"
            raise RecipeError(
                f"--epochs: {length:.3g} are too few for a batch of {measured[-1]}, which makes "
                f"{updates:.0f} updates in its shortest run where {FEWEST_UPDATES} are needed; "
                f"valid: at least {needed:.3g} epochs ({limit}), or smaller batches"
            )
        has_runs = any(record.kind != "probe" for record in self.journal.records)
        trained = [*measured, *[base.recipe.batch_size] * (method != "runs")]
        self.base = base.with_one_pass(trained, known["one_pass"] if has_runs else None)
        chosen = {"epochs": length, "batches": list(measured), "one_pass": self.base.one_pass}
        if {key: known.get(key) for key in chosen} != chosen:
            self.journal.choose(**chosen, prices={})
        return length, measured

    def _price(self, batches: Sequence[int], method: str) -> float:
        """Epochs of the runs with the fewest seeds, in the length of the target run."""
        least, most = min(batches), max(batches)
        further = further_runs(self.base, batches, 1.0, lambda b: (most + b) / (most + least), 0)
        runs = [*first_runs(self.base, batches, 1.0), *_FEWEST_SEEDS * further]
        whole = sum(run.epochs for run in runs)
        whole -= sum(AROUND)  # which are the same in both
        parts = sum(run.epochs for run in plan_branches(self.base, batches, 1.0)) + max(POINTS)
        return {"runs": whole, "branches": parts, "both": whole + parts}[method]

    def _allowed_epochs(self) -> float:
        """Epochs that the rest of the budget allows, after a short run that measures the speed."""
        left = math.inf
        if self.budget.minutes is not None:
            base, own = self.base, self.base.recipe.batch_size
            length = min(max(0.25, _PROBE * own / base.images), base.recipe.epochs)
            probe = Run(own, length, base.recipe.seed)
            record = self.journal.find(probe, "probe") or self._probe(probe)
            if record.status == "diverged":
                raise RecipeError(
                    f"optimizer.lr: the run of {length:.3g} epochs that measures the speed "
                    "diverged; valid: a lower rate, or the length of the runs by --epochs"
                )
            seconds = 60 * self.budget.minutes - self.journal.seconds
            left = seconds / (record.train_seconds / record.trained)
            if left <= 0:
                raise RecipeError("--minutes: the budget is spent; valid: more")
        if self.budget.epochs is not None:
            left = min(left, self.budget.epochs - self.journal.trained)
            if left <= 0:
                raise RecipeError("--max-epochs: the budget is spent; valid: more")
        return left

    def _probe(self, run: Run) -> Record:
        """Make a run that measures the speed, with the threads of one of several workers."""
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads // self.workers))
        record = self._make(run, "probe", workers=self.workers)
        torch.set_num_threads(threads)
        return record

    def make_all(self, runs: Sequence[Run]) -> bool:
        """Make those runs that have not been made; False once the budget does not suffice."""
        missing = [run for run in runs if self.journal.find(run) is None]
        while missing:
            together = missing[: self.workers]
            if not self._affords(sum(run.epochs for run in together), len(together)):
                self.left_out += missing
                return False
            if self.workers > 1:
                self._make_side_by_side(together)
            else:
                self._make(together[0])
            missing = missing[self.workers :]
        return True

    def _make_side_by_side(self, runs: Sequence[Run]) -> None:
        """Make runs at the same time, each in a process of its own."""
        start, before = time.monotonic(), self.journal.seconds
        make_side_by_side(
            self.base,
            runs,
            [[*self.base.overrides(run), *self._same_precision()] for run in runs],
            [self._folder(f"run-{index}") for index in range(len(runs))],
            self.workers,
            self._keep,
        )
        self.journal.wait(time.monotonic() - start - (self.journal.seconds - before))

    def _affords(self, epochs: float, runs: int = 1) -> bool:
        """Whether the budget holds so many epochs in so many runs."""
        budget, journal = self.budget, self.journal
        if budget.epochs is not None and journal.trained + epochs > budget.epochs + 1e-9:
            return False
        if budget.minutes is None or not journal.records:
            return True
        trained = sum(record.trained for record in journal.records)
        in_steps = sum(record.train_seconds for record in journal.records)
        rate, beside = in_steps / max(trained, 1e-9), journal.seconds - in_steps
        expected = rate * epochs + beside / len(journal.records) * runs
        return journal.seconds + expected <= 60 * budget.minutes

    def _branch(self, batches: Sequence[int], epochs: float) -> None:
        """Train the trunk from point to point, and the branches of each point."""
        base = self.base
        runs = plan_branches(base, batches, epochs)
        before = 0.0
        for after in dict.fromkeys(run.after for run in runs):
            mine = [run for run in runs if run.after == after]
            trunk = Run(base.recipe.batch_size, after, base.recipe.seed)
            if any(self.journal.find(run) is None for run in mine):
                if not self.journal.find(trunk, "trunk"):
                    if not self._affords(after - before):
                        self.left_out += mine
                        return
                    self._make(trunk, "trunk", trunk_overrides(base, epochs, after), before)
                saved = self.journal.find(trunk, "trunk")
                if saved is None or saved.status == "diverged":
                    return
                if not self._make_all_branches(mine, epochs):
                    return
            before = after

    def _make_all_branches(self, runs: Sequence[Run], epochs: float) -> bool:
        for index, run in enumerate(runs):
            if self.journal.find(run) is None:
                if not self._affords(run.epochs):
                    self.left_out += [r for r in runs[index:] if self.journal.find(r) is None]
                    return False
                with self.job.raise_on_all_ranks():
                    overrides = branch_overrides(self.base, run, epochs, self._folder("trunk"))
                self._make(run, "run", overrides, run.after)
        return True

    def _folder(self, name: str) -> Path:
        return self.base.path.parent / name

    def _same_precision(self) -> list[str]:
        """The precision that the first run chose, where the recipe leaves the choice."""
        return [f"precision={r.precision}" for r in self.journal.records[:1] if r.precision]

    def _make(
        self,
        run: Run,
        kind: str = "run",
        overrides: Sequence[str] = (),
        since: float = 0.0,
        workers: int = 1,
    ) -> Record:
        """Make a run from the epoch ``since`` on, and write its record."""
        record, signal = make_run(
            self.base,
            run,
            self.job,
            self._folder("trunk" if kind == "trunk" else "run"),
            kind=kind,
            overrides=[*(overrides or self.base.overrides(run)), *self._same_precision()],
            since=since,
            workers=workers,
        )
        self._keep(record)
        if signal:
            raise SystemExit(128 + signal)
        return record

    def _keep(self, record: Record) -> None:
        self.journal.append(record)
        loss = self.base.floor + record.loss
        result = f"training loss {loss:.4f}, held-out top-1 {record.top1:.2f} %"
        if record.status == "diverged":
            result = "diverged"
        name = {"run": "", "probe": "speed: ", "trunk": "trunk: "}[record.kind]
        self.say(f"{name}{record.run}: {result} ({record.seconds:.0f} s)")

    def _fit(self, *, whole: bool) -> CriticalBatch | str:
        try:
            seen = (whole_runs if whole else branches)(self.journal)
            return fit_losses(seen, self.base.rule)
        except RecipeError as error:
            return str(error)


def _expected(
    found: CriticalBatch | str, batch: int, smallest: int, batches: Sequence[int]
) -> float:
    """Epochs of a batch in those of the smallest, by a first fit or without one."""
    if isinstance(found, CriticalBatch):
        return float(found.factor(batch, smallest)[0])
    return (max(batches) + batch) / (max(batches) + smallest)


def _is_narrow(found: CriticalBatch | str) -> bool:
    return isinstance(found, CriticalBatch) and found.high <= _NARROW * found.low
