"""The command ``largebatch critical-batch``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .launch import torchrun
from .options import Fitted, Gpu, Links, Measured, Overrides, RecipeName


def critical_batch(
    recipe: RecipeName,
    overrides: Overrides = None,
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="N,N…",
            help="Batch sizes to measure; default: three, a factor of two apart, around the "
            "recipe's.",
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            help="Length of the run whose loss is the target, with the smallest of the batches, in "
            "epochs; default: the recipe's, or as long as the time allows. A longer run has a "
            "larger critical batch: an estimate by short runs is on the safe side.",
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
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="runs: whole runs of several lengths; branches: from a checkpoint of the recipe's "
            "own run; or both.",
        ),
    ] = "runs",
    minutes: Annotated[
        float | None,
        typer.Option(min=1e-9, help="Time limit of all runs; default without --max-epochs: 15."),
    ] = None,
    max_epochs: Annotated[
        float | None, typer.Option(min=1e-9, help="Limit of the epochs that all runs train.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N,N…",
            help="Also predict the time to the target on so many GPUs, of --gpu and --links.",
        ),
    ] = None,
    gpu: Gpu = None,
    links: Links = None,
    measured: Measured = None,
    fitted: Fitted = None,
    nproc: Annotated[
        int, typer.Option(min=1, help="Number of processes to start here, one per GPU.")
    ] = 1,
    workers: Annotated[
        int,
        typer.Option(
            min=1, help="Number of runs to make side by side, which share this machine's cores."
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for runs and results; one with finished runs is continued. Default: "
            "critical-batch/RECIPE.",
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
) -> None:
    """Estimate how many epochs a larger batch needs.

    Trains the recipe at several batch sizes and lengths, and compares the training losses
    at their ends. Prints for each batch size the epochs and updates to the same loss,
    with an interval, and the speed-up if every GPU were perfect; says what is measured and what is
    predicted. Finished runs are kept: the same command continues.

    \b
      largebatch critical-batch digits --batches 64,128,256 --minutes 10

    On several machines, run this on each of them:

    \b
      torchrun --nnodes N --nproc-per-node GPUS
          --rdzv-backend c10d --rdzv-endpoint HOST:PORT
          -m largebatch.recipes.critical_batch RECIPE [OPTIONS]
    """
    from ..errors import AgreedError
    from ..launcher import is_first_of_machine
    from ..training.process import reported_once
    from ..tune.critical_batch.command import Options, run, whole_numbers
    from ..tune.critical_batch.hours import Gpus

    started = "RANK" in os.environ
    is_main = os.environ.get("RANK", "0") == "0"
    with reported_once(lambda error: is_first_of_machine()):
        options = Options(
            recipe=recipe,
            overrides=tuple(overrides or ()),
            batches=whole_numbers("--batches", batches),
            epochs=epochs,
            rule=rule,
            method=method,
            minutes=minutes,
            max_epochs=max_epochs,
            workers=workers,
            gpus=Gpus(whole_numbers("--gpus", gpus), gpu, links, measured, fitted),
            out=out,
            json=json_,
        )
        options.check(nproc)
    if started or nproc == 1:
        with reported_once(lambda error: is_main or not isinstance(error, AgreedError)):
            run(options)
        return
    torchrun(nproc, "largebatch.recipes.critical_batch", options.arguments())
