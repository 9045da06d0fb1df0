"""What a search tried and found, as data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from optuna.trial import FrozenTrial

from .line import WORST, Results, Score
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
        settings: Its values by name.
        state: Whether it runs, or how it ended.
        place: Place of its rate on the line of the fine stage, 0 at the centre.
        seed: 0 if it trained with the recipe's seed, 1 with the one after it.
        top1: Accuracy in percent at the last evaluation, on the held-out images; None before any.
        loss: Mean loss there. May not be finite.
        epochs: Epochs of training images that it has taken.
        seconds: Time that it took; 0 until it has ended.
    """

    stage: str
    number: int
    settings: Settings
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
        known = {"state": "running", **trial.user_attrs}
        if trial.state.name == "FAIL" and known["state"] == "running":
            known["state"] = "interrupted"  # by a signal that cannot be caught
        return cls(stage, trial.number, **{"settings": trial.params, **known})

    @property
    def counts(self) -> bool:
        """Whether its settings need not be tried again."""
        return self.state not in ("out of time", "interrupted")

    @property
    def score(self) -> Score:
        """What orders trials of one stage: accuracy, then loss."""
        if self.state == "diverged" or self.top1 is None or self.loss is None:
            return WORST
        return self.top1, -self.loss if math.isfinite(self.loss) else -math.inf


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        recipe: Name or path of the recipe.
        overrides: Overrides that the user gave.
        best: The best trial.
        best_overrides: Overrides that give the recipe the best trial's values at full length:
            ``load(found.recipe, [*found.overrides, *found.best_overrides])`` is the tuned recipe,
            without ``data.holdout``.
        trials: All trials, coarse ones first.
        space: The ranges.
        epochs: Epochs of a run of the recipe.
        held_out: Number of training images that scored the trials.
        folder: Folder of the study.
    """

    recipe: str
    overrides: tuple[str, ...]
    best: Tried
    best_overrides: tuple[str, ...]
    trials: tuple[Tried, ...] = field(repr=False)
    space: Space
    epochs: float
    held_out: int
    folder: Path


def best_of(trials: Iterable[Tried]) -> Tried | None:
    """The best trial by its own result: a finished one if there is one, None if all diverged."""
    known = [t for t in trials if t.score > WORST]
    return max(known, key=lambda t: (t.state == "finished", t.score), default=None)


def line_of(trials: Iterable[Tried]) -> Results:
    """The results of the fine stage by place on the line and seed."""
    return {(t.place, t.seed): t.score for t in trials if t.stage == "fine" and t.counts}
