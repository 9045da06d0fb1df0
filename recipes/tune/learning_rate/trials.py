"""A trial and the result of the search as data, and which of two trials is better."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .space import Dimension, Settings

#: coarse: trials of a share of the recipe's length; fine: of all of it.
Stage = Literal["coarse", "fine"]
STAGES: tuple[Stage, ...] = ("coarse", "fine")
Metric = Literal["top1", "loss"]
#: running, or how a trial ended. finished: at its last step; pruned: stopped as hopeless; diverged:
#: its loss was not finite, or no better than that of guessing; interrupted: its worker ended.
State = Literal["running", "finished", "pruned", "diverged", "interrupted"]


@dataclass(frozen=True)
class Tried:
    """A trial.

    Attributes:
        stage: ``coarse`` or ``fine``.
        number: Its number in the stage, from 0.
        settings: Its values by dimension.
        state: Whether it runs, or how it ended.
        top1: Accuracy in percent at the last evaluation, on the held-out images; None before any.
        loss: Mean loss there. May not be finite.
        epochs: Epochs of training images that it has taken; while it runs, until its last
            evaluation.
        seconds: Time that it took; 0 until it has ended.
        machine: Where it ran.
    """

    stage: Stage
    number: int
    settings: Settings
    state: State
    top1: float | None = None
    loss: float | None = None
    epochs: float = 0.0
    seconds: float = 0.0
    machine: str = ""

    @property
    def counts(self) -> bool:
        """Whether its settings need not be tried again."""
        return self.state != "interrupted"


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        recipe: Name or path of the recipe.
        overrides: Overrides that the user gave.
        best: The best trial, of full length if one finished.
        best_overrides: Overrides that give the recipe the best trial's values at full length:
            ``load(found.recipe, [*found.overrides, *found.best_overrides])`` is the tuned recipe,
            without ``data.holdout``.
        trials: All trials in the order in which they began, coarse ones first.
        space: The dimensions.
        epochs: Epochs of a run of the recipe.
        coarse: Length of a coarse trial over that.
        held_out: Number of training images that scored the trials.
        metric: What orders trials.
        folder: Folder of the study.
    """

    recipe: str
    overrides: tuple[str, ...]
    best: Tried
    best_overrides: tuple[str, ...]
    trials: tuple[Tried, ...] = field(repr=False)
    space: tuple[Dimension, ...]
    epochs: float
    coarse: float
    held_out: int
    metric: Metric
    folder: Path


def score(trial: Tried, metric: Metric) -> tuple[float, float]:
    """What orders trials of one stage, the best one highest; ties in accuracy go by the loss.

    One that did not finish is below all that did, and one that diverged is last.
    """
    ended_well = trial.state == "finished" and trial.loss is not None
    if trial.top1 is None or trial.loss is None or not (ended_well or trial.state == "pruned"):
        return (-math.inf, -math.inf)
    loss = trial.loss if math.isfinite(trial.loss) else math.inf
    first = trial.top1 if metric == "top1" else -loss
    return (first, -loss) if ended_well else (first - 1e9, -loss)


def ranked(trials: Iterable[Tried], metric: Metric) -> list[Tried]:
    """Trials with the best first: finished ones, those of full length before coarse ones."""
    return sorted(
        trials,
        key=lambda t: (t.state == "finished", t.stage == "fine", score(t, metric)),
        reverse=True,
    )
