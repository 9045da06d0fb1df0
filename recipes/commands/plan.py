"""The command ``largebatch plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import (
    Fitted,
    Gpu,
    GpusPerNode,
    ImagesPerSecond,
    Links,
    Measured,
    Overrides,
    Oversubscription,
    Picture,
    RecipeName,
    check_picture,
)


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    gpus: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Numbers of GPUs, such as 8,64,512.")
    ] = "8",
    gpu: Gpu = None,
    images_per_second: ImagesPerSecond = None,
    measured: Measured = None,
    evaluation_images_per_second: Annotated[
        float | None,
        typer.Option(
            min=1e-9, help="Throughput of one GPU in evaluation; default: 3 times that of training."
        ),
    ] = None,
    checkpoint_seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Time of a checkpoint; default: 0.5 s and its bytes at 1 GB/s."),
    ] = None,
    links: Links = None,
    oversubscription: Oversubscription = 1.0,
    gpus_per_node: GpusPerNode = None,
    fitted: Fitted = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of an hour of one GPU, for the cost.")
    ] = None,
    out: Picture = Path("plan.png"),
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of tables and a picture.")
    ] = False,
) -> None:
    """Plan a run before it starts: steps, memory per GPU, time to train and cost.

    For each number of GPUs: accumulation, images per GPU and per batch norm, memory in each
    precision, bytes reduced per step, step time, efficiency, and the time to train with evaluation
    and checkpoints. Nothing is trained and no GPU is needed: memory is counted on tensors without
    numbers, and time follows from the throughput of one GPU and a simulation of the all-reduce. The
    assumption that dominates is named, with the times to train between which it leaves the run.

    \b
      largebatch plan resnet50-b65536 --gpu h100 --gpus 8,64,512
    """
    import json

    from ..errors import exit_on_user_error
    from ..predict.division import gpu_counts
    from ..predict.run_plan import plan_run
    from ..predict.run_report import as_json, draw, print_summary
    from ..schema.load import load

    with exit_on_user_error():
        if not json_:
            check_picture(out)
        found = plan_run(
            load(recipe, overrides or []),
            gpu_counts(gpus),
            gpu=gpu,
            images_per_second=images_per_second,
            measured=measured,
            oversubscription=oversubscription,
            evaluation_images_per_second=evaluation_images_per_second,
            checkpoint_seconds=checkpoint_seconds,
            links=links,
            gpus_per_node=gpus_per_node,
            fitted=fitted,
            price=price_per_gpu_hour,
        )
        if json_:
            print(json.dumps(as_json(found), indent=2))
            return
        draw(found, out)
    print_summary(found)
    print(out)
