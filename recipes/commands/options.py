"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..schema.names import recipe_names


def complete_recipe(incomplete: str) -> list[str]:
    """The names of packaged recipes that begin so, and the YAML files of the current folder."""
    files = map(str, Path().glob("*.y*ml"))
    return [name for name in (*recipe_names(), *files) if name.startswith(incomplete)]


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Name of a recipe, or path of a .yaml file.",
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Values to use in place of the recipe's, such as schedule.warmup=10ep. `largebatch "
        "recipes keys` explains all keys.",
    ),
]
RunOrWeights = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="Folder of a run or of one of its checkpoints, or a file of weights: a weights.pt, or "
        "a .pth or .safetensors of timm.",
    ),
]
RunWeightsOrName = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="Folder of a run or of one of its checkpoints, a file of weights (a weights.pt, or a "
        ".pth or .safetensors of timm), or timm:NAME for weights that timm has published.",
    ),
]
RecipeOfWeights = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="RECIPE",
        help="Recipe that the weights are of; default: the recipe.yaml of the run, or beside the "
        "file.",
        autocompletion=complete_recipe,
    ),
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Import the model that the run's recipe.yaml names by path."),
]
Ema = Annotated[
    bool, typer.Option("--ema", help="Take the moving average of the run's weights (ema.decay).")
]

Gpu = Annotated[
    str | None, typer.Option(metavar="NAME", help="p40, p100, v100, a100, h100, h200 or b200.")
]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="GPUs per node; default: 8.")]
Links = Annotated[
    str | None,
    typer.Option(
        metavar="INTRA+INTER",
        help="Links inside a node and between nodes, such as nvlink4+ndr-x8; default: those common "
        "with the GPU.",
    ),
]
Fitted = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Links measured by comm tune (its .tuned.json).")
]
Measured = Annotated[
    str | None,
    typer.Option(
        metavar="[GPUSx]IMAGES:RATE",
        help="Measured throughput: images per GPU, and images per second of one GPU or of GPUS "
        "together, such as 256:2470 or, of a whole node, 8x256:16621. Two with a comma, such as "
        "8x64:15100,8x256:16621, also say how a small batch slows down. A rate with ms is the time "
        "of a step. Default: published for ResNet-50 on the GPU.",
    ),
]
