"""The command ``largebatch critical-batch``."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..errors import RecipeError, is_reported_here
from .launch import torchrun_again
from .options import Overrides, RecipeName


def critical_batch(
    context: typer.Context,
    recipe: RecipeName,
    overrides: Overrides = None,
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="N,N…",
            help="Batch sizes to measure, best multiples of the smallest; default: three, a factor "
            "of two apart, around the recipe's.",
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            help="Length of the run whose loss is the target, with the smallest of the batches, in "
            "epochs; default: the recipe's. All runs together take 10 to 20 times that. A longer "
            "run has a larger critical batch: an estimate by short runs is on the safe side.",
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="How the learning rate follows the batch: linear or sqrt; default: linear for "
            "sgd, else sqrt.",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=1e-9, help="Time after which no further run is begun.")
    ] = 15.0,
    nproc: Annotated[
        int, typer.Option(min=1, help="Number of processes to start here, one per GPU.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for runs and results; one with runs is continued. Default: "
            "critical-batch/RECIPE.",
        ),
    ] = None,
) -> None:
    """Estimate how many epochs a larger batch needs.

    Trains the recipe at several batch sizes and lengths, and compares the training losses
    at their ends. Prints for each batch size the epochs and updates to the same loss,
    with an interval, and the speed-up if every GPU were perfect; says what is measured and what is
    predicted. Each run keeps its folder: the same command continues.

    \b
      largebatch critical-batch digits --batches 32,64,128 --epochs 6

    On several machines, give torchrun, as `largebatch train --help` shows it,

    \b
      -m largebatch.recipes critical-batch RECIPE [OPTIONS]
    """
    from ..launcher import is_first_of_machine
    from ..ranks import device_of, joined
    from ..schema.load import load
    from ..training.process import reported_once
    from ..tune.critical_batch import report
    from ..tune.critical_batch.base import Base
    from ..tune.critical_batch.estimate import estimate

    with reported_once(is_first_of_machine):
        sizes = _whole_numbers(batches) if batches is not None else ()
        loaded = load(recipe, overrides or ())
        folder = out or Path("critical-batch") / loaded.name
        device_of(loaded.recipe, nproc - 1)
        base = Base.of(loaded, folder, nproc, rule)
        if sizes:
            base.checked(sizes)
    if "RANK" not in os.environ and nproc > 1:
        torchrun_again(context, nproc)
        return
    with reported_once(is_reported_here):
        with joined(loaded.recipe) as job:
            found = estimate(
                loaded,
                job,
                folder,
                batches=sizes,
                epochs=epochs,
                rule=rule,
                minutes=minutes,
                say=partial(typer.echo, err=True),
            )
        if job.is_main:
            written = report.write(found, folder)
            report.print_summary(found)
            print(written)


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Parse whole numbers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RecipeError(
            f"--batches: {text!r} is not a list of whole numbers; valid: such as 64,128"
        ) from None
