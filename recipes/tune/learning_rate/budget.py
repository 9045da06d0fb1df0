"""How much a search may cost, and which stage comes next: coarse trials, then fine ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .trials import STAGES, Stage, Tried

#: Part of the epochs or minutes that coarse trials may take.
COARSE_SHARE = 0.5
#: Part of the number of trials that may be coarse.
COARSE_TRIALS = 2 / 3


@dataclass(frozen=True)
class Budget:
    """What a search may take; None is no limit.

    Attributes:
        trials: Number of trials of all workers together, without those that were interrupted.
        epochs: Epochs of training images of all workers together.
        minutes: Time of each worker, from its start.
    """

    trials: int | None = None
    epochs: float | None = None
    minutes: float | None = None


@dataclass(frozen=True)
class Lengths:
    """Epochs of a trial of each stage; ``coarse`` is None where there is only the fine stage."""

    coarse: float | None
    fine: float

    def of(self, stage: Stage) -> float:
        """Epochs of a trial of a stage."""
        return self.fine if stage == "fine" or self.coarse is None else self.coarse


def next_stage(
    trials: Sequence[Tried],
    lengths: Lengths,
    budget: Budget,
    elapsed_seconds: float = 0.0,
    machine: str = "",
) -> Stage | None:
    """Return the stage of the next trial, None if none fits into what is left.

    A trial that runs counts with its whole length. Coarse trials take up to a share of the budget,
    and leave enough for one fine trial; they go on while none of them has finished.

    Args:
        trials: All trials so far, of all workers.
        lengths: Epochs of trials.
        budget: The limits.
        elapsed_seconds: Time since this worker started.
        machine: Where it runs: trials there tell how long a trial takes.
    """
    cost = {s: _epochs([t for t in trials if t.stage == s], lengths) for s in STAGES}
    count = {s: sum(t.counts and t.stage == s for t in trials) for s in STAGES}
    epochs, number = sum(cost.values()), sum(count.values())
    seconds = {s: _seconds(trials, s, lengths, machine) for s in STAGES}

    def fits(stage: Stage) -> bool:
        return (
            (budget.epochs is None or epochs + lengths.of(stage) <= budget.epochs + 1e-6)
            and (budget.trials is None or number + 1 <= budget.trials)
            and (budget.minutes is None or elapsed_seconds + seconds[stage] <= 60 * budget.minutes)
        )

    def leaves_a_fine_one(share: float, share_of_trials: float) -> bool:
        """Whether a coarse trial fits into a share, and a fine one into the rest."""
        coarse = lengths.of("coarse")
        if budget.epochs is not None:
            spent = cost["coarse"] + coarse
            if spent > share * budget.epochs + 1e-6:
                return False
            if epochs + coarse + lengths.fine > budget.epochs + 1e-6:
                return False
        if budget.trials is not None:
            most = min(int(share_of_trials * budget.trials), budget.trials - 1)
            if count["coarse"] + 1 > most:
                return False
        if budget.minutes is not None:
            whole, until = 60 * budget.minutes, elapsed_seconds + seconds["coarse"]
            if until > share * whole or until + seconds["fine"] > whole:
                return False
        return fits("coarse")

    if lengths.coarse is not None:
        ended_well = any(t.stage == "coarse" and t.state in ("finished", "running") for t in trials)
        shares = (COARSE_SHARE, COARSE_TRIALS) if ended_well or not count["coarse"] else (1.0, 1.0)
        if leaves_a_fine_one(*shares):
            return "coarse"
    return "fine" if fits("fine") else None


def _epochs(trials: Sequence[Tried], lengths: Lengths) -> float:
    """What trials have taken, those that run with their whole length."""
    return sum(lengths.of(t.stage) if t.state == "running" else t.epochs for t in trials)


def _seconds(trials: Sequence[Tried], stage: Stage, lengths: Lengths, machine: str) -> float:
    """Expected time of a trial; 0 before any has finished on this machine."""
    done = [t for t in trials if t.state == "finished" and t.machine == machine and t.epochs]
    alike = [t for t in done if t.stage == stage] or done
    if not alike:
        return 0.0
    return lengths.of(stage) * statistics.median(t.seconds / t.epochs for t in alike)
