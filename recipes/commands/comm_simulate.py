"""The command ``largebatch comm simulate``."""

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


def comm_simulate(
    recipe: RecipeName,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(help="Size of the largest cluster.")] = 32768,
    gpu: Gpu = None,
    links: Links = None,
    gpus_per_node: GpusPerNode = None,
    images_per_second: ImagesPerSecond = None,
    measured: Measured = None,
    images_per_gpu: Annotated[
        int | None,
        typer.Option(min=1, help="Images per GPU and step; default: micro_batch_size."),
    ] = None,
    alpha_us: Annotated[
        float | None, typer.Option(help="Latency between nodes, in microseconds.")
    ] = None,
    gbit: Annotated[
        float | None, typer.Option(help="Line rate between nodes, in Gbit/s per node.")
    ] = None,
    bus_gbytes: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            help="Bus bandwidth between nodes as nccl-tests reports it, in GB/s; default: 80 % of "
            "the line rate.",
        ),
    ] = None,
    oversubscription: Oversubscription = 1.0,
    intra_alpha_us: Annotated[
        float | None, typer.Option(help="Latency inside a node, in microseconds.")
    ] = None,
    intra_gbit: Annotated[
        float | None, typer.Option(help="Line rate inside a node, in Gbit/s per GPU.")
    ] = None,
    fitted: Fitted = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan; default: the best predicted one.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Algorithm for every message size, in place of a plan."),
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="Also consider sending gradients as fp16 or bf16."),
    ] = None,
    out: Picture = Path("simulation.png"),
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of a table and a picture.")
    ] = False,
) -> None:
    """Predict a recipe's step time and scaling efficiency on many GPUs.

    Weak scaling: each GPU processes the same number of images per step on a cluster of any size.
    The speeds of GPUs and links are printed with their sources. The column nccl is what NCCL
    does by itself; the unfused flat ring is the baseline of Jia et al. Any model of timm can be
    simulated with its throughput, in place of the recipe's.

    \b
      largebatch comm simulate resnet50-b65536 --gpu v100 --gpus 1024
      largebatch comm simulate resnet50-b65536 model.name=vit_base_patch16_224
        --gpu a100 --measured 64:120,256:440
    """
    import json

    from ..errors import exit_on_user_error
    from ..predict.report import as_json, draw, print_summary
    from ..predict.scaling import setting, sweep
    from ..schema.load import load

    with exit_on_user_error():
        if not json_:
            check_picture(out)
        common = setting(
            load(recipe, overrides or []),
            gpu=gpu,
            links=links,
            gpus_per_node=gpus_per_node,
            images_per_second=images_per_second,
            measured=measured,
            bus_gbytes=bus_gbytes,
            oversubscription=oversubscription,
            images_per_gpu=images_per_gpu,
            inter=(alpha_us, gbit),
            intra=(intra_alpha_us, intra_gbit),
            fitted=fitted,
            plan=plan,
            algorithm=algorithm,
            wire=wire,
        )
        points = sweep(common, gpus)
        if json_:
            print(json.dumps(as_json(common, points), indent=2))
            return
        draw(common, points, out)
    print_summary(common, points)
    print(out)
