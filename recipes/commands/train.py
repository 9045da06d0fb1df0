"""The command ``largebatch train``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import exit_on_user_error
from .launch import torchrun
from .options import Overrides, RecipeName


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    nproc: Annotated[
        int, typer.Option(min=1, help="Number of processes to start here, one per GPU.")
    ] = 1,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the newest checkpoint; short for resume=true."
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", help="Show nothing but warnings and errors, on standard error."),
    ] = False,
) -> None:
    """Train a recipe on this machine.

    Checkpoints, metrics and a report are written to a new folder runs/RECIPE/DATE-AND-TIME, or to
    run_dir=DIR.

    \b
      largebatch train digits
      largebatch train digits epochs=5 optimizer.lr=2 --nproc 2

    To train on several machines, run this on each of them, HOST being one of them:

    \b
      torchrun --nnodes N --nproc-per-node GPUS --max-restarts 3
          --rdzv-backend c10d --rdzv-endpoint HOST:PORT
          -m largebatch.recipes.train RECIPE [KEY=VALUE]...

    With resume=true, a restarted rank continues from the newest checkpoint.
    """
    from ..training.process import ending_in_one_line, going_on

    values = [*(overrides or []), *(["resume=true"] if resume else [])]
    with going_on(), ending_in_one_line(), exit_on_user_error():
        from ..schema.load import load

        loaded = load(recipe, values)  # before the imports that take seconds
        from ..ranks import device_of

        device_of(loaded.recipe, nproc - 1)  # and this before those that take longer
        from ..train import check
        from ..train import train as train_here
        from ..training.process import age_seconds

        if nproc == 1:
            train_here(loaded, quiet=quiet, began_seconds=age_seconds())
            return
        check(loaded, nproc)  # reported once here, not by each process
    torchrun(nproc, "largebatch.recipes.train", [recipe, *values, *["--quiet"] * quiet])
