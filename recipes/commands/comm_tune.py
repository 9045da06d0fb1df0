"""The command ``largebatch comm tune``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import RecipeError, is_reported_here
from .launch import torchrun_again
from .options import complete_recipe


def comm_tune(
    context: typer.Context,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Plan to write, beside its measurements and a picture."),
    ],
    nproc: Annotated[
        int | None, typer.Option(min=2, help="Number of processes to start here, one per GPU.")
    ] = None,
    budget_seconds: Annotated[
        float, typer.Option(min=1, help="Time limit of the measurements, in seconds.")
    ] = 110.0,
    race_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="Time limit of the race between the best plans under a running backward pass, "
            "in seconds; 0 leaves it out.",
        ),
    ] = 60.0,
    wire: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DTYPE", help="Also consider sending gradients as fp16 or bf16, which is lossy."
        ),
    ] = None,
    sum_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="With --wire: consider only algorithms that sum in this dtype: fp32.",
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of ranks to treat as one node; default: those of a machine."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="Choose the fusion threshold for this recipe.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    images_per_second: Annotated[
        float | None, typer.Option(min=1e-9, help="With --recipe: throughput of one rank.")
    ] = None,
) -> None:
    """Measure every all-reduce algorithm here, and write a plan.

    Fits the latency and bandwidth of the links, and picks the fastest algorithm for each message
    size. The three plans that should be best, and DDP's default, then race under a running
    backward pass; a tie keeps the simpler plan. Train with comm.plan=FILE to use the winner.

    On several machines, give torchrun, as `largebatch train --help` shows it,

    \b
      -m largebatch.recipes comm tune [OPTIONS]
    """
    from ..launcher import is_first_of_machine
    from ..training.process import reported_once
    from ..tune.all_reduce import Options, run

    started = "RANK" in os.environ
    with reported_once(is_first_of_machine):
        if nproc is None and not started:
            raise RecipeError("--nproc: missing; valid: a number of processes, or use torchrun")
        options = Options(
            out,
            budget_seconds=budget_seconds,
            race_seconds=race_seconds,
            wire=tuple(wire or ()),
            sum_dtype=sum_dtype,
            ranks_per_node=ranks_per_node,
            recipe=recipe,
            images_per_second=images_per_second,
        )
        options.check()
    if started:
        with reported_once(is_reported_here):
            run(options)
        return
    assert nproc is not None
    torchrun_again(context, nproc)
