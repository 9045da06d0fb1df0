"""The folder that a run writes into: which one it is, and that all ranks see the same."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from ..errors import RecipeError
from ..ranks import Job
from ..schema.load import Loaded, default_run_dir, latest_run
from . import checkpoint
from .metrics import METRICS

#: How long a network file system may take to show one machine what another one wrote; NFS keeps
#: what it knows of a folder for up to 60 s.
_PATIENCE_SECONDS = 90.0


def run_folder(loaded: Loaded, started: str) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint to resume from if there is one.

    Raises:
        RecipeError: the folder holds a run that is not to be resumed.
    """
    recipe = loaded.recipe
    wanted = recipe.resume.from_
    folder = Path(recipe.run_dir) if recipe.run_dir else None
    if folder is None and wanted == "latest":
        folder = latest_run(loaded.name)
    if folder is None:
        folder = default_run_dir(loaded.name, started)
    if wanted == "latest":
        return folder, checkpoint.latest(folder / checkpoint.CHECKPOINTS)
    if (folder / METRICS).exists():
        raise RecipeError(
            f"run_dir: {folder} already holds a run; resume=true goes on with it, another "
            "run_dir starts anew"
        )
    if wanted is None:
        return folder, None
    checkpoint.read_state(Path(wanted))
    return folder, Path(wanted)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A body that begins to write a run's folder.

    Raises:
        RecipeError: it cannot.
    """
    what = "made"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        what = "written"
        yield
    except OSError as error:
        raise RecipeError(
            f"run_dir: {folder} cannot be {what}: {error.strerror}; valid: a folder, new or of a "
            "run to resume"
        ) from error


def check_shared(folder: Path, job: Job) -> None:
    """See that the folder of each rank is the one that rank 0 writes; it is made if need be.

    Checkpoints are written by all ranks: with folders of their own on each machine, none would
    ever be whole.

    Raises:
        AgreedError: it cannot be made, or a rank does not see what rank 0 wrote.
    """
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
                        f"run_dir: {folder} is not the folder that rank 0 writes; valid: one on "
                        "storage that all machines see"
                    )
                time.sleep(0.5)
                with suppress(OSError):
                    os.listdir(folder.parent)  # has NFS look again
    finally:
        if job.is_main:
            seen.unlink()
