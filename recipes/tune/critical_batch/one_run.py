"""Make one run of an estimate and record what it measured."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...ranks import Job
from ...training.folder.outcome import column, metrics_of
from ..trial import Outcome, measure
from .journal import Record
from .runs import Base, Run

#: Part of a run, at its end, whose training loss counts.
LAST = 0.15


class Made(NamedTuple):
    """What came of a run.

    Attributes:
        record: Its record.
        signal: Number of a signal to stop that came too late to stop it; 0: none came.
    """

    record: Record
    signal: int


def make_run(
    base: Base,
    run: Run,
    job: Job,
    folder: Path,
    *,
    kind: str = "run",
    overrides: Sequence[str] = (),
    since: float = 0.0,
    workers: int = 1,
) -> Made:
    """Make a run on the ranks of a job; collective.

    Args:
        base: The recipe, which is written.
        run: The run.
        job: The ranks.
        folder: Folder of the run. It is removed before and after, except that of a trunk.
        kind: As in :class:`.journal.Record`.
        overrides: Overrides of the recipe.
        since: Epoch at which the run begins to train, where it continues another one.
        workers: Number of runs side by side, by which the time is divided.
    """
    if kind != "trunk" and job.is_main:  # left over from a run that was interrupted
        shutil.rmtree(folder, ignore_errors=True)
    job.gather(None)
    outcome = measure(str(base.path), overrides, job, folder)
    found = None
    if job.is_main:
        found = _record(base, run, kind, outcome, folder, since, workers)
        if kind != "trunk":
            shutil.rmtree(folder, ignore_errors=True)
    record = job.gather(found)[0]
    assert record is not None
    return Made(record, outcome.signal)


def _record(
    base: Base, run: Run, kind: str, outcome: Outcome, folder: Path, since: float, workers: int
) -> Record:
    finished = outcome.status == "finished"
    last = outcome.readings[-1] if finished else None
    lines = [line for line in metrics_of(folder).train if line["epoch"] > since + 1e-6]
    return Record(
        run=run,
        status="finished" if finished else "diverged",
        loss=final_loss(outcome.training, since) - base.floor if finished else math.inf,
        top1=last.top1 if last else 0.0,
        held_out_loss=last.loss if last else math.inf,
        trained=outcome.epochs - since,
        seconds=outcome.seconds / workers,
        train_seconds=sum(column(lines, "seconds")) / workers,
        precision=outcome.precision,
        noise=tuple(
            (line["epoch"], line["noise_scale"], line["noise_scale_error"])
            for line in lines
            if line.get("noise_scale") is not None and line["noise_scale_error"] is not None
        ),
        kind=kind,
    )


def final_loss(training: Sequence[tuple[float, float]], since: float = 0.0) -> float:
    """Mean training loss over the last part of a run.

    Args:
        training: Pairs of epoch and mean loss since the pair before, in order.
        since: Epoch at which the run began.
    """
    end = training[-1][0] if training else since
    begins = end - LAST * (end - since)
    total = epochs = 0.0
    before = since
    for epoch, loss in training:
        weight = epoch - max(before, begins)
        before = epoch
        if weight > 0:
            total, epochs = total + weight * loss, epochs + weight
    return total / epochs if epochs else math.inf
