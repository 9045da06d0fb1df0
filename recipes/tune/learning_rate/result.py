"""What a search tried and found, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from optuna.trial import FrozenTrial

from .line import WORST, Score
from .space import Settings, Space

#: running, or how a trial ended. finished: at its last step; pruned: stopped, as it was behind the
#: others; diverged: its loss or weights were no longer finite; out of time: stopped at the end of
#: the budget; interrupted: its process ended. Trials of the last two kinds are made again.
State = Literal["running", "finished", "pruned", "diverged", "out of time", "interrupted"]


@dataclass(frozen=True)
class Tried:
    """A trial, with what its last evaluation on the held-out images found."""

    stage: str  # ``coarse`` or ``fine``
    number: int  # in the stage, from 0
    lr: float  # at its peak
    warmup: float  # as a share of the run
    state: State
    place: int = 0  # of its rate on the line of the fine stage, 0 at the centre
    seed: int = 0  # 0 if it trained with the recipe's seed, 1 with the one after it
    top1: float | None = None  # percent; None before any evaluation
    loss: float | None = None  # mean; None before any, or if it was not finite
    epochs: float = 0.0  # of training images that it has taken
    seconds: float = 0.0  # 0 until it has ended

    @classmethod
    def of(cls, stage: str, trial: FrozenTrial) -> Tried:
        """The trial that Optuna's journal has."""
        known = {**trial.params, "state": "running", **trial.user_attrs}
        if trial.state.name == "FAIL" and known["state"] == "running":
            known["state"] = "interrupted"  # by a signal that cannot be caught
        return cls(stage, trial.number, **known)

    @property
    def settings(self) -> Settings:
        """Its values."""
        return Settings(self.lr, self.warmup)

    @property
    def counts(self) -> bool:
        """Whether its settings need not be tried again."""
        return self.state not in ("out of time", "interrupted")

    @property
    def score(self) -> Score:
        """What orders trials of one stage: accuracy, then loss."""
        if self.state == "diverged" or self.top1 is None or self.loss is None:
            return WORST
        return self.top1, -self.loss


#: Trials by place on the line of the fine stage, and number of the seed.
Line = Mapping[tuple[int, int], Tried]


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    recipe: str  # name or path
    overrides: tuple[str, ...]  # that the user gave
    best: Tried
    best_overrides: tuple[str, ...]  # that give the recipe the best values at full length
    trials: tuple[Tried, ...]  # coarse ones first
    line: Line  # those on the line of the fine stage
    space: Space
    epochs: float  # of a run of the recipe
    held_out: int  # training images that scored the trials
    folder: Path  # of the study

    @property
    def neighbours(self) -> list[Tried]:
        """The trials at the rates beside the best one, with the same seed."""
        if self.best not in self.line.values():
            return []
        places = (self.best.place - 1, self.best.place + 1)
        return [self.line[place, 0] for place in places if (place, 0) in self.line]

    def behind(self, trial: Tried) -> float:
        """By how many points a trial is behind the best one."""
        return (self.best.top1 or 0.0) - (trial.top1 or 0.0)


def best_of(trials: Iterable[Tried]) -> Tried | None:
    """The best trial by its own result: a finished one if there is one, None if all diverged."""
    known = [t for t in trials if t.score > WORST]
    return max(known, key=lambda t: (t.state == "finished", t.score), default=None)
