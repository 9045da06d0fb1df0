"""The commands ``largebatch comm tune`` and ``largebatch comm simulate``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .launch import torchrun
from .options import Overrides, RecipeName

comm_app = typer.Typer(
    help="Measure and predict all-reduces.", no_args_is_help=True, rich_markup_mode=None
)


@comm_app.command("tune")
def comm_tune(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Plan to write, with measurements and a picture.")
    ] = Path("plan.json"),
    nproc: Annotated[
        int | None, typer.Option(min=2, help="Processes on this machine, started with torchrun.")
    ] = None,
    budget_seconds: Annotated[
        float, typer.Option(min=1, help="Time that measuring may take.")
    ] = 110.0,
    wire: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE", help="Gradients may also be sent so: fp16, bf16. Lossy."),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks taken as one node; default: torchrun's machines."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="Choose the fusion threshold for it.")
    ] = None,
    images_per_second: Annotated[
        float | None, typer.Option(help="With --recipe: what one rank reaches.")
    ] = None,
) -> None:
    """Measure every all-reduce algorithm, fit the links, and write a plan.

    On several machines, start it with torchrun on each of them: torchrun --nnodes N
    --nproc-per-node GPUS --rdzv-backend c10d --rdzv-endpoint HOST:PORT
    -m largebatch.recipes.tune_comm [OPTIONS]
    """
    from ..errors import RecipeError, exit_on_user_error
    from ..tune.comm import check, run

    started = "RANK" in os.environ
    leads = os.environ.get("RANK", "0") == "0"
    with exit_on_user_error(lambda error: leads):  # all ranks find the same
        if nproc is None and not started:
            raise RecipeError("--nproc: say how many processes, or start it with torchrun")
        check(out, wire=wire or (), recipe=recipe, images_per_second=images_per_second)
        if started:
            run(
                out,
                budget_seconds=budget_seconds,
                wire=wire or (),
                ranks_per_node=ranks_per_node,
                recipe=recipe,
                images_per_second=images_per_second,
            )
            return
    options: list[str] = ["--out", str(out), "--budget-seconds", str(budget_seconds)]
    for name in wire or ():
        options += ["--wire", name]
    for option, value in (
        ("--ranks-per-node", ranks_per_node),
        ("--recipe", recipe),
        ("--images-per-second", images_per_second),
    ):
        if value is not None:
            options += [option, str(value)]
    assert nproc is not None
    torchrun(nproc, "largebatch.recipes.tune_comm", options)


@comm_app.command("simulate")
def comm_simulate(
    recipe: RecipeName,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(help="The largest cluster.")] = 32768,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="p40, p100, v100, a100 or h100.")
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(metavar="INTRA+INTER", help="Such as pcie3+roce100; default: the GPU's."),
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Default: 8.")] = None,
    images_per_second: Annotated[
        float | None, typer.Option(min=1e-9, help="Of one GPU; default: the GPU's on ResNet-50.")
    ] = None,
    images_per_gpu: Annotated[
        int | None, typer.Option(min=1, help="In a step; default: micro_batch_size.")
    ] = None,
    alpha_us: Annotated[float | None, typer.Option(help="Latency between nodes.")] = None,
    gbit: Annotated[float | None, typer.Option(help="Rate between nodes, of one node.")] = None,
    intra_alpha_us: Annotated[float | None, typer.Option(help="Latency inside a node.")] = None,
    intra_gbit: Annotated[
        float | None, typer.Option(help="Rate inside a node, of one GPU.")
    ] = None,
    fitted: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Links that comm tune fitted.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan; default: the model's choice.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(metavar="NAME", help="For every size, in place of a plan.")
    ] = None,
    wire: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Gradients may be sent so: fp16, bf16.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Picture to write: .png, .svg or .pdf.")
    ] = Path("simulation.png"),
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, and draw nothing.")] = False,
) -> None:
    """Predict a recipe's step time and scaling efficiency on many GPUs.

    Each GPU sees the same number of images per step on every cluster. Numbers of GPUs and links
    are printed with their sources.
    """
    import json

    from ..errors import exit_on_user_error
    from ..predict.report import as_json, draw, print_summary
    from ..predict.scaling import setting, sweep
    from ..schema.load import load

    with exit_on_user_error():
        common = setting(
            load(recipe, overrides or []),
            gpu=gpu,
            links=links,
            gpus_per_node=gpus_per_node,
            images_per_second=images_per_second,
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
