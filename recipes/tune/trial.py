"""Short runs of a recipe by the real trainer, measured on held-out training images.

The validation set stays untouched: ``data.holdout`` takes its place. A run is the recipe's own
training, with its batch, accumulation, ranks and precision; only what it writes is left out.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...lars import Span
from ..errors import RecipeError, StorageError, TrainingError
from ..ranks import Job
from ..schema.load import load, override
from ..schema.recipe import Recipe
from ..training.callbacks import Callback, Metrics, RunContext
from ..training.data import open_split
from ..training.timeline import Timeline
from ..training.trainer import Trainer

#: Part of the training images that is held out unless the recipe or an override says otherwise.
HELD_OUT = 0.1

#: Overrides under which a run writes nothing but its metrics and a last checkpoint, and does not
#: stop before its end.
PLAIN = (
    *("checkpoint.every=null", "target_accuracy=null", "trust_ratios_every=null"),
    *("gradient_noise_every=null", "ema.decay=null", "track=[]", "callbacks=[]"),
)


@dataclass(frozen=True)
class Reading:
    """An evaluation on the held-out images."""

    step: int
    epoch: float
    loss: float  # mean, without label smoothing; may not be finite
    top1: float  # percent


@dataclass(frozen=True)
class Outcome:
    """What a run measured."""

    status: Literal["finished", "stopped", "diverged"]  # stopped: by what watched it
    readings: tuple[Reading, ...]  # in order; of a run that diverged, those before it did
    epochs: float  # of training images read, which the run cost
    seconds: float  # that it took, with its start
    #: With ``log_every=1``, the median time of an update after the first two, which take longer;
    #: of fewer, that of the last one.
    step_seconds: float = math.nan
    evaluation_seconds: float = 0.0  # median of an evaluation; 0 without any
    #: Number of a signal to stop that came too late to stop the run; the caller should end.
    signal: int = 0


#: Is given each reading, and returns why the run should stop, or None to let it go on.
Watch = Callable[[Reading], str | None]


def measure(
    recipe: str,
    overrides: Sequence[str],
    job: Job,
    run_dir: Path,
    watch: Watch | None = None,
) -> Outcome:
    """Train on the ranks of a job, into ``run_dir``; ``watch`` is called on rank 0; collective."""
    start = time.monotonic()
    loaded = load(recipe, [*overrides, *PLAIN, override("run_dir", str(run_dir))])
    recorder = _Recorder(watch)
    status: Literal["finished", "stopped", "diverged"] = "finished"
    trainer = Trainer.of(loaded, job, quiet=True, warns=False, callbacks=[recorder], results=False)
    try:
        trainer.run()
        status = "stopped" if trainer.step < trainer.last_step else "finished"
    except StorageError:
        raise
    except TrainingError:
        status = "diverged"
    steps = recorder.step_seconds
    outcome = Outcome(
        status,
        tuple(recorder.readings),
        trainer.timeline.epoch(trainer.step),
        time.monotonic() - start,
        statistics.median(steps[2:] or steps[-1:] or [math.nan]),
        statistics.median(recorder.evaluation_seconds or [0.0]),
        int(job.all_reduce_max(trainer.signal)[0]),
    )
    del trainer
    gc.collect()  # the trainer refers to itself, and holds the model and the decoded images
    return job.gather(outcome)[0]


def held_out(recipe: Recipe) -> int:
    """Return how many training images to hold out: the recipe's number, or a part of them."""
    if recipe.data.source == "synthetic":
        raise RecipeError(
            "data.source: synthetic images have nothing to learn; valid here: a source of images"
        )
    if recipe.data.holdout:
        return recipe.data.holdout
    train = open_split(recipe.data, "train")
    number = round(HELD_OUT * len(train))
    if number < 1:
        raise RecipeError(
            f"data.holdout: {HELD_OUT:.0%} of {len(train)} training images is less than one; "
            "valid: a number of images"
        )
    return number


#: The keys of a recipe that hold lengths of its run, apart from ``epochs``.
LENGTHS = ("schedule", "stages", "stop_after")


def relative_lengths(recipe: Recipe, timeline: Timeline) -> dict[str, Any]:
    """Values of :data:`LENGTHS` as shares of the run, in proportion for any ``epochs``."""

    def part(span: Span) -> Span:
        return of_run(share_of(span, recipe, timeline))

    own, stop = recipe.schedule, recipe.stop_after
    schedule = {
        "warmup": part(own.warmup),
        "decay": own.decay and part(own.decay),
        "milestones": tuple(map(part, own.milestones)),
    }
    return {
        "schedule": own.model_copy(update=schedule),
        "stages": tuple(s.model_copy(update={"from_": part(s.from_)}) for s in recipe.stages),
        "stop_after": stop and part(stop),
    }


def share_of(span: Span, recipe: Recipe, timeline: Timeline) -> float:
    """A length from the start of the run as a share of the run."""
    epochs = timeline.epoch(round(span.value)) if not span.unit else span.value
    return epochs if span.unit == "dur" else epochs / recipe.epochs


def of_run(share: float) -> Span:
    """A share of the run as a length, at most the whole."""
    return Span(min(round(share, 6), 1.0), "dur")


class _Recorder(Callback):
    """Collects the readings of a run, and stops it if what watches them says so."""

    def __init__(self, watch: Watch | None) -> None:
        self.readings: list[Reading] = []
        self.evaluation_seconds: list[float] = []
        self.step_seconds: list[float] = []
        self._watch, self._began = watch, math.nan

    def on_step_begin(self, step: int) -> None:
        self._began = time.perf_counter()

    def on_start(self, run: RunContext) -> None:
        self._stop = run.stop

    def on_log(self, metrics: Metrics) -> None:
        if metrics.split == "train":
            self.step_seconds.append(time.perf_counter() - self._began)
            return
        self.evaluation_seconds.append(metrics.values["seconds"])
        reading = Reading(
            metrics.step, metrics.epoch, metrics.values["loss"], metrics.values["top1"]
        )
        self.readings.append(reading)
        if self._watch and (reason := self._watch(reading)):
            self._stop(reason)
