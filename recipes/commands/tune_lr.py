"""The command ``largebatch tune lr``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from .launch import torchrun
from .options import Overrides, RecipeName


def tune_lr(
    recipe: RecipeName,
    overrides: Overrides = None,
    lr: Annotated[
        str | None,
        typer.Option(
            metavar="LOW..HIGH",
            help="Range of the peak learning rate; default: a 30th of the recipe's to 30 times it, "
            "with --range a 100th to 100 times.",
        ),
    ] = None,
    also: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Vary these too: power, momentum, weight_decay, trust_coefficient.",
        ),
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Limit of trials.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Limit of time, for each worker.")] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Limit of epochs trained; default, without another limit: 8 times the recipe's."
        ),
    ] = None,
    coarse: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Length of a coarse trial over the recipe's; 1: none is coarse; default: 0.25.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="top1|loss", help="What is best on the held-out images; default: top1."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the settings that are tried; default: 0.")
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON in place of a table.")
    ] = False,
    range_only: Annotated[
        bool,
        typer.Option(
            "--range",
            help="Instead of a search, run a range test: one short run in which the learning rate "
            "rises until training diverges.",
        ),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(help="With --range: number of updates; default: an epoch, 60 to 120."),
    ] = None,
) -> None:
    """Search for a recipe's peak learning rate and warm-up.

    Trains the recipe with many settings at a quarter of its length, and the best ones at full
    length, under its own batch, accumulation, ranks and precision. A tenth of the training images,
    or data.holdout, is held out to score them; the validation set is not read. Runs that diverge
    or fall behind end early.

    \b
      largebatch tune lr digits
      largebatch tune lr digits batch_size=512 --minutes 20 --nproc 2
      largebatch tune lr cifar10-b256 --also weight_decay --epochs 100
      largebatch tune lr cifar10-b256 --range

    Writes trials.png, trials.json and recipe.yaml, which extends the recipe, into tuning/RECIPE.
    The same command resumes a search that was interrupted, goes on with a larger budget, and shares
    the work when it is started several times, on several machines too.

    To train each trial on several machines, run this on each of them:

    \b
      torchrun --nnodes N --nproc-per-node GPUS
          --rdzv-backend c10d --rdzv-endpoint HOST:PORT
          -m largebatch.recipes.tune_lr RECIPE [KEY=VALUE]... [OPTIONS]
    """
    from ..errors import AgreedError, RecipeError
    from ..launcher import is_first_of_machine
    from ..schema.load import load
    from ..train import check
    from ..training.process import reported_once

    started = "RANK" in os.environ
    is_main = os.environ.get("RANK", "0") == "0"
    values = overrides or []
    with reported_once(lambda error: is_first_of_machine()):
        loaded = load(recipe, values)
        folder = out or Path("tuning") / loaded.name
        span = _range(lr)
        searching = {
            **{"also": also, "trials": trials, "minutes": minutes, "epochs": epochs},
            **{"coarse": coarse, "metric": metric, "seed": seed},
        }
        _check_mode(range_only, steps, [n for n, v in searching.items() if v is not None])
        if metric not in (None, "top1", "loss"):
            raise RecipeError(f"--metric: unknown metric {metric!r}; valid: top1, loss")
        if not started and nproc > 1:
            check(loaded, nproc)
    if started or nproc == 1:
        with reported_once(lambda error: is_main or not isinstance(error, AgreedError)):
            from ..ranks import joined

            if range_only:
                from ..tune.learning_rate import range_report
                from ..tune.learning_rate.range_test import range_test

                with joined(loaded.recipe) as job:
                    test = range_test(recipe, values, job, folder, lr=span, steps=steps)
                if job.is_main:
                    range_report.show(test, folder, as_json)
                return
            from ..tune.learning_rate import report
            from ..tune.learning_rate.search import Options, search

            options = Options(
                lr=span,
                also=tuple(name for name in (also or "").replace(",", " ").split()),
                coarse=0.25 if coarse is None else coarse,
                metric="loss" if metric == "loss" else "top1",
                trials=trials,
                epochs=epochs,
                minutes=minutes,
                seed=seed or 0,
            )
            with joined(loaded.recipe) as job:
                found = search(recipe, values, job, folder, options, say=_say)
                if not job.is_main:
                    return
                written = report.write(found, folder)
                report.check_recipe(folder / report.RECIPE)
            if as_json:
                print(json.dumps(report.numbers(found), indent=1))
                return
            report.print_summary(found)
            for path in written:
                print(path)
            processes = f" --nproc {job.world_size}" if job.world_size > 1 else ""
            print(f"train it: largebatch train {folder / report.RECIPE}{processes}")
        return
    given = (
        *(("--lr", lr), ("--also", also), ("--trials", trials), ("--minutes", minutes)),
        *(("--epochs", epochs), ("--coarse", coarse), ("--metric", metric), ("--seed", seed)),
        *(("--out", folder), ("--steps", steps)),
    )
    options_given = [str(v) for name, value in given if value is not None for v in (name, value)]
    torchrun(
        nproc,
        "largebatch.recipes.tune_lr",
        [recipe, *values, *options_given, *["--json"] * as_json, *["--range"] * range_only],
    )


def _check_mode(range_only: bool, steps: int | None, searching: list[str]) -> None:
    """Check that no option of a search is given for a range test, or the other way around.

    Raises:
        RecipeError: One is.
    """
    from ..errors import RecipeError

    if range_only and searching:
        raise RecipeError(f"--{searching[0]}: only for a search; valid with --range: --lr, --steps")
    if steps is not None and not range_only:
        raise RecipeError("--steps: only for a range test; valid: with --range")


def _say(line: str) -> None:
    """Show progress, apart from the result."""
    typer.echo(line, err=True)


def _range(text: str | None) -> tuple[float, float] | None:
    """Parse LOW..HIGH.

    Raises:
        RecipeError: It is malformed.
    """
    from ..errors import RecipeError

    if text is None:
        return None
    low, dots, high = text.partition("..")
    try:
        if dots:
            return float(low), float(high)
    except ValueError:
        pass
    raise RecipeError(f"--lr: {text!r} is not a range; valid: LOW..HIGH, such as 0.1..10")
