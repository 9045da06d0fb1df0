"""The command ``largebatch comm simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Fitted, Gpu, GpusPerNode, Links, Measured, Overrides, RecipeName


def comm_simulate(
    recipe: RecipeName,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(help="Size of the largest cluster.")] = 32768,
    gpu: Gpu = None,
    measured: Measured = None,
    images_per_gpu: Annotated[
        int | None, typer.Option(min=1, help="Images per GPU and step; default: micro_batch_size.")
    ] = None,
    links: Links = None,
    gpus_per_node: GpusPerNode = None,
    bus_gbytes: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            help="Bus bandwidth between nodes as nccl-tests reports it, in GB/s; default: 80 % of "
            "the line rate, which an oversubscribed network does not reach.",
        ),
    ] = None,
    fitted: Fitted = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan; default: DDP's own all-reduce.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Predict a recipe's step time and scaling efficiency on many GPUs.

    Weak scaling: each GPU processes the same number of images per step on a cluster of any size.
    The efficiency is relative to the GPU or node that was measured, at its own best batch, and is
    printed with the range in which published runs lie. The speeds of GPUs and links are printed
    with their sources. Any model of timm can be simulated with its throughput, in place of the
    recipe's.

    \b
      largebatch comm simulate resnet50-b65536 --gpu v100 --gpus 1024
      largebatch comm simulate resnet50-b65536 model.name=vit_base_patch16_224
        --gpu a100 --measured 8x64:4000,8x256:4600
    """
    import json

    from ...comm import Plan
    from ..predict.scaling import as_json, print_summary, setting, sweep
    from ..schema.load import load

    common = setting(
        load(recipe, overrides or []),
        gpu=gpu,
        links=links,
        gpus_per_node=gpus_per_node,
        measured=measured,
        bus_gbytes=bus_gbytes,
        images_per_gpu=images_per_gpu,
        fitted=fitted,
    )
    points = sweep(common, gpus, Plan.load(plan) if plan else None)
    if json_:
        print(json.dumps(as_json(common, points), indent=2))
    else:
        print_summary(common, points)
