"""The folder that a run writes into: its choice, and a check that all ranks share it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from ...errors import RecipeError
from ...ranks import Job
from ...schema.load import Loaded, latest_run
from . import checkpoint
from .names import CHECKPOINTS
from .outcome import has_metrics

#: Time that a network file system may take to show a file written by another machine; NFS caches
#: the content of a folder for up to 60 s.
_PATIENCE_SECONDS = 90.0


@dataclass(frozen=True)
class RunPlace:
    """The folder of a run, and the checkpoint that it resumes from."""

    folder: Path
    resume_from: Path | None = None  # the checkpoint; None starts at step 0
    saved: dict[str, Any] = field(default_factory=dict)  # its state; empty without one
    damaged: list[str] = field(default_factory=list)  # a line for each newer one, passed over


def agreed_place(loaded: Loaded, job: Job) -> RunPlace:
    """Return what :func:`run_place` says on rank 0, with the paths of this rank's recipe."""
    recipe, place = loaded.recipe, RunPlace(Path())
    with job.raise_on_all_ranks():
        if recipe.run_dir is None and job.local_world_size < job.world_size:
            raise RecipeError(
                "run_dir: not set, and this run has several machines; valid: a folder on storage "
                "that all of them share, and resume=true besides to continue after a restart"
            )
        if job.is_main:
            place = run_place(loaded, time.strftime("%Y-%m-%d_%H-%M-%S"))
    place = job.gather(place)[0]
    folder = Path(recipe.run_dir) if recipe.run_dir else place.folder
    path = place.resume_from
    if path is not None and recipe.resume.from_ == "latest":
        path = folder / CHECKPOINTS / path.name
    elif path is not None:
        path = Path(str(recipe.resume.from_))
    return replace(place, folder=folder, resume_from=path)


def run_place(loaded: Loaded, started: str) -> RunPlace:
    """Return a run's folder, and the checkpoint to resume from if there is one, verified."""
    wanted, run_dir = loaded.recipe.resume.from_, loaded.recipe.run_dir
    found = latest_run(loaded.name) if wanted == "latest" and not run_dir else None
    folder = Path(run_dir or found or Path("runs") / loaded.name / started)
    if wanted == "latest":
        path, state, damaged = checkpoint.newest_intact(folder / CHECKPOINTS)
        resuming = f"resuming from {path.name} instead" if path else ""
        return RunPlace(folder, path, state, [f"{problem}: {resuming}" for problem in damaged])
    resumes_itself = wanted is not None and is_of(Path(wanted), folder)
    there = checkpoint.latest(folder / CHECKPOINTS)
    if (has_metrics(folder) or there) and not resumes_itself:
        raise RecipeError(
            f"run_dir: {folder} already holds a run; valid: resume=true to continue it, "
            "resume=PATH with one of its checkpoints, or another run_dir to start a new one"
        )
    if wanted is None:
        return RunPlace(folder)
    return RunPlace(folder, Path(wanted), checkpoint.read_state(Path(wanted)))


def is_of(path: Path, folder: Path) -> bool:
    """Whether a checkpoint is one of a run folder's own."""
    return path.resolve().parent == (folder / CHECKPOINTS).resolve()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Context manager that creates a run's folder, for a body that writes into it."""
    what = "created"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        what = "written"
        yield
    except OSError as error:
        raise RecipeError(
            f"run_dir: {folder} cannot be {what}: {error.strerror}; valid: a new folder, or "
            "that of a run to resume"
        ) from error


def check_shared(folder: Path, job: Job) -> None:
    """Check that all ranks share the run's folder, which is created if it does not exist."""
    if job.world_size == 1:
        return
    seen = folder / f".seen-{job.from_main(uuid4().hex)}"
    with job.raise_on_all_ranks():
        if job.is_main:
            with writing(folder):
                seen.touch()
    try:
        with job.raise_on_all_ranks():
            end = time.monotonic() + _PATIENCE_SECONDS
            while not seen.exists():
                if time.monotonic() > end:
                    raise RecipeError(
                        f"run_dir: {folder} is not the folder that rank 0 writes; valid: a folder "
                        "on storage that all machines share"
                    )
                time.sleep(0.5)
                with suppress(OSError):
                    os.listdir(folder.parent)  # makes NFS refresh its cache
    finally:
        if job.is_main:
            seen.unlink()
