"""The command ``largebatch plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Fitted, Gpu, GpusPerNode, Links, Measured, Overrides, RecipeName


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    gpus: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Numbers of GPUs, such as 8,64,512.")
    ] = "8",
    gpu: Gpu = None,
    measured: Measured = None,
    links: Links = None,
    gpus_per_node: GpusPerNode = None,
    fitted: Fitted = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of an hour of one GPU, for the cost.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
) -> None:
    """Forecast a run: steps, memory per GPU, time and cost.

    For each number of GPUs: accumulation, images per GPU and per batch norm, memory, bytes
    reduced per step, step time, efficiency, the images that each node must read
    per second, and the time to train with evaluation and checkpoints, with one range from all
    assumptions. Nothing is trained and no GPU is needed: memory is counted on tensors without
    numbers, and time follows from a measured throughput and a simulation of the all-reduce.

    \b
      largebatch plan resnet50-b65536 --gpu h100 --gpus 8,64,512
    """
    import json

    from ..schema.load import load

    loaded = load(recipe, overrides or [])  # before the imports that take seconds
    from ..predict.division import gpu_counts
    from ..predict.run_plan import plan_run
    from ..predict.run_report import as_json, print_summary

    found = plan_run(
        loaded,
        gpu_counts(gpus),
        gpu=gpu,
        measured=measured,
        links=links,
        gpus_per_node=gpus_per_node,
        fitted=fitted,
        price=price_per_gpu_hour,
    )
    if json_:
        print(json.dumps(as_json(found), indent=2))
    else:
        print_summary(found)
