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
    """A trial.

    Attributes:
        stage: ``coarse`` or ``fine``.
        number: Its number in the stage, from 0.
        lr: Its peak learning rate.
        warmup: Its warm-up as a share of the run.
        state: Whether it runs, or how it ended.
        place: Place of its rate on the line of the fine stage, 0 at the centre.
        seed: 0 if it trained with the recipe's seed, 1 with the one after it.
        top1: Accuracy in percent at the last evaluation, on the held-out images; None before any.
        loss: Mean loss there; None before any, or if it was not finite.
        epochs: Epochs of training images that it has taken.
        seconds: Time that it took; 0 until it has ended.
    """

    stage: str
    number: int
    lr: float
    warmup: float
    state: State
    place: int = 0
    seed: int = 0
    top1: float | None = None
    loss: float | None = None
    epochs: float = 0.0
    seconds: float = 0.0

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
    """The result of a search.

    Attributes:
        recipe: Name or path of the recipe.
        overrides: Overrides that the user gave.
        best: The best trial.
        best_overrides: Overrides that give the recipe the best trial's values at full length.
        trials: All trials, coarse ones first.
        line: Those on the line of the fine stage.
        space: The ranges.
        epochs: Epochs of a run of the recipe.
        held_out: Number of training images that scored the trials.
        folder: Folder of the study.
    """

    recipe: str
    overrides: tuple[str, ...]
    best: Tried
    best_overrides: tuple[str, ...]
    trials: tuple[Tried, ...]
    line: Line
    space: Space
    epochs: float
    held_out: int
    folder: Path


def best_of(trials: Iterable[Tried]) -> Tried | None:
    """The best trial by its own result: a finished one if there is one, None if all diverged."""
    known = [t for t in trials if t.score > WORST]
    return max(known, key=lambda t: (t.state == "finished", t.score), default=None)
