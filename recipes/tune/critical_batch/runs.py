"""The runs of an estimate: which there are, and what their folders say of them.

Each run is a whole training, as the length of a run and its learning rates go together. It has a
folder of its own, which is all that is kept of it: a run whose folder says that it has ended is not
made again, and one that was stopped continues.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ...errors import RecipeError
from ...ranks import Job
from ...schema.load import RECIPE, differences, load
from ...schema.recipe import Recipe
from ...training.folder.names import CHECKPOINTS
from ...training.folder.outcome import column, metrics_of, outcome_of
from ..trial import PLAIN, measure
from .base import Base

#: Lengths of further runs of the smallest batch, in that of the target run: the slope of its loss.
AROUND = (1 / 1.5, 1.5)
#: Part of a run, at its end, whose training loss counts.
LAST = 0.15


@dataclass(frozen=True)
class Run:
    """A run to make: its global batch size, epochs and seed."""

    batch_size: int
    epochs: float
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"batch-{self.batch_size}-epochs-{self.epochs:g}-seed-{self.seed}"

    def __str__(self) -> str:
        return f"batch {self.batch_size:,}, {self.epochs:.3g} epochs, seed {self.seed}"


@dataclass(frozen=True)
class Record:
    """A run that ended, as its folder tells it."""

    run: Run
    status: Literal["finished", "diverged"]
    #: Mean training loss over the last part of the run, above the lowest that is possible; infinite
    #: if it diverged.
    loss: float
    top1: float  # percent of the held-out images at the end; 0 if it diverged
    trained: float  # epochs of training that it cost
    seconds: float  # of its training steps


def runs_of(lengths: Mapping[int, float], seed: int, *, first: bool = False) -> list[Run]:
    """Each batch at its length, and the smallest at two lengths around it, shortest first."""
    smallest = min(lengths)
    own = [(batch, epochs) for batch, epochs in lengths.items() if first or batch > smallest]
    own += [(smallest, lengths[smallest] * part) for part in AROUND]
    runs = [Run(batch, length_of(epochs), seed) for batch, epochs in own]
    return sorted(runs, key=lambda run: (run.epochs, run.batch_size))


def length_of(epochs: float) -> float:
    """The length of a run, of four digits."""
    return float(f"{epochs:.4g}")


def final_loss(losses: Sequence[float]) -> float:
    """Mean of the last of a run's training losses, which are read at equal distances."""
    last = losses[-max(1, round(LAST * len(losses))) :]
    return fmean(last) if last else math.inf


def record_of(base: Base, run: Run, job: Job, folder: Path) -> Record | None:
    """Read a run's folder on rank 0, for all ranks; None if the run has not ended."""
    found = None
    with job.raise_on_all_ranks():
        if job.is_main and (folder / RECIPE).exists():
            found = _read(base, run, folder)
    return job.gather(found)[0]


def make(base: Base, run: Run, job: Job, folder: Path) -> Record:
    """Make a run on the ranks of a job, and keep its folder without checkpoints; collective."""
    overrides = base.overrides(run.batch_size, run.epochs, run.seed)
    outcome = measure(str(base.out / RECIPE), [*overrides, "resume=true"], job, folder)
    if job.is_main:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    if outcome.signal:
        raise SystemExit(128 + outcome.signal)
    record = record_of(base, run, job, folder)
    assert record is not None
    return record


def _read(base: Base, run: Run, folder: Path) -> Record | None:
    before = load(str(folder / RECIPE)).recipe
    overrides = [*base.overrides(run.batch_size, run.epochs, run.seed), *PLAIN]
    old, new = _content(before), _content(load(str(base.out / RECIPE), overrides).recipe)
    # The trainer has decided what ``auto`` stands for.
    new |= {key: value for key, value in old.items() if new.get(key) == "auto"}
    if changed := differences(old, new):
        raise RecipeError(
            f"--out: {folder} holds a run of another recipe: {changed[0]}; valid: another folder"
        )
    outcome, train = outcome_of(folder), metrics_of(folder).train
    trained = (outcome.step or 0) * run.batch_size / base.images
    costs = (trained, outcome.seconds or 0.0)
    if outcome.state == "diverged":
        return Record(run, "diverged", math.inf, 0.0, *costs)
    if outcome.state != "finished":
        return None
    loss = final_loss(column(train, "loss")) - base.floor
    return Record(run, "finished", loss, outcome.top1 or 0.0, *costs)


def _content(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", by_alias=True)
