"""Make several runs at the same time on the cores of a machine, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from threading import Thread

import torch

from ...errors import TrainingError
from ...ranks import Job, device_of
from .journal import Record
from .one_run import make_run
from .runs import Base, Run


def make_side_by_side(
    base: Base,
    runs: Sequence[Run],
    overrides: Sequence[Sequence[str]],
    folders: Sequence[Path],
    share: int,
    keep: Callable[[Record], None],
) -> None:
    """Make runs at the same time.

    Args:
        base: The recipe, which is written.
        runs: The runs.
        overrides: Overrides of the recipe for each run.
        folders: Folder of each run.
        share: Number by which the cores and the times are divided.
        keep: Is given the record of each run that ended, also where another one failed.

    Raises:
        TrainingError: A process was killed.
        RecipeError, DataError: As :func:`.one_run.make_run`.
    """
    errors: list[Exception] = []
    with ProcessPoolExecutor(len(runs), multiprocessing.get_context("spawn")) as pool:
        made = [
            pool.submit(_make_run_alone, base, run, folder, changes, share)
            for run, changes, folder in zip(runs, overrides, folders, strict=True)
        ]
        for ended in as_completed(made):
            try:
                record = ended.result()
            except Exception as error:  # the neighbours may still end well
                errors.append(error)
            else:
                keep(record)
    if any(isinstance(error, BrokenProcessPool) for error in errors):
        raise TrainingError(
            "--workers: the process of a run was killed, for want of memory perhaps; valid: fewer "
            "workers (the same command continues with the runs that have ended)"
        )
    if errors:
        raise errors[0]


def _make_run_alone(
    base: Base, run: Run, folder: Path, overrides: Sequence[str], share: int
) -> Record:
    """Make a run in this process."""
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // share))
    job = Job(0, 1, 1, device_of(base.recipe, 0))
    return make_run(base, run, job, folder, overrides=overrides, workers=share).record


def _end_with_parent() -> None:
    """End this process once the one that started it has ended, for whatever reason."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
