"""The command ``largebatch tune lr``."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..errors import RecipeError, is_reported_here
from .launch import torchrun_again
from .options import Overrides, RecipeName


def tune_lr(
    context: typer.Context,
    recipe: RecipeName,
    overrides: Overrides = None,
    lr: Annotated[
        str | None,
        typer.Option(
            metavar="LOW..HIGH",
            help="Range of the peak learning rate; default: a 30th of the recipe's to 30 times it.",
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Time that the search may take; default: 30.")
    ] = None,
    runs: Annotated[
        float | None,
        typer.Option(
            help="Instead of --minutes, a budget in runs of the recipe, whatever time these take."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the study; default: tuning/RECIPE."),
    ] = None,
    nproc: Annotated[
        int,
        typer.Option(
            min=1, help="Number of processes to start here, one per GPU, that train each trial."
        ),
    ] = 1,
) -> None:
    """Search for a recipe's peak learning rate and warm-up.

    Times a step and fits the lengths of trials to the budget. Short coarse trials find where good
    settings are; longer fine ones compare learning rates beside the best one, and repeat the best
    two with a second seed. Each trial trains the recipe under its own batch, accumulation, ranks
    and precision. A tenth of the training images, or data.holdout, is held out to score them; the
    validation set is not read.

    \b
      largebatch tune lr digits --minutes 10
      largebatch tune lr digits batch_size=512 --minutes 20 --nproc 2
      largebatch tune lr cifar10-b256 --lr 0.1..10 --runs 10

    Writes recipe.yaml, which extends the recipe, trials.json, trials.png and Optuna's journal.log
    into tuning/RECIPE. The recipe is the best so far after each trial, and whatever ends the
    search. The same command resumes a search that was interrupted.

    On several machines, give torchrun, as `largebatch train --help` shows it,

    \b
      -m largebatch.recipes tune lr RECIPE [KEY=VALUE]... [OPTIONS]
    """
    from ..launcher import is_first_of_machine
    from ..schema.load import load
    from ..train import check
    from ..training.process import reported_once

    started = "RANK" in os.environ
    values = overrides or []
    with reported_once(is_first_of_machine):
        loaded = load(recipe, values)
        folder = out or Path("tuning") / loaded.name
        span = _range(lr)
        if minutes is not None and runs is not None:
            raise RecipeError("--runs: cannot be combined with --minutes")
        if not started and nproc > 1:
            check(loaded, nproc)
    if started or nproc == 1:
        with reported_once(is_reported_here):
            from ..ranks import joined
            from ..tune.learning_rate import report
            from ..tune.learning_rate.search import Search

            with joined(loaded.recipe) as job:
                limit = 30.0 if minutes is None else minutes
                say = partial(typer.echo, err=True)
                found = Search(recipe, values, job, folder, span, limit, runs, say).run()
            if not job.is_main:
                return
            written = [report.draw(found), *report.write(found)]
            processes = f" --nproc {job.world_size}" if job.world_size > 1 else ""
            print(*report.summary(found), *written, sep="\n")
            print(f"train it: largebatch train {folder / report.RECIPE}{processes}")
        return
    torchrun_again(context, nproc)


def _range(text: str | None) -> tuple[float, float] | None:
    """Parse LOW..HIGH."""
    if text is None:
        return None
    low, dots, high = text.partition("..")
    try:
        if dots:
            return float(low), float(high)
    except ValueError:
        pass
    raise RecipeError(f"--lr: {text!r} is not a range; valid: LOW..HIGH, such as 0.1..10")
