"""The command ``largebatch export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Ema, RecipeOfWeights, RunOrWeights, TrustCode


def export(
    run: RunOrWeights,
    to: Annotated[
        str,
        typer.Option(
            metavar="TARGET", help="timm, for a model of timm; safetensors or onnx, for any model."
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="New folder for the weights and their model card.")
    ],
    recipe: RecipeOfWeights = None,
    ema: Ema = False,
    trust_code: TrustCode = False,
) -> None:
    """Export trained weights in FP32, with a model card.

    Writes the weights, a README.md in the form of the Hugging Face Hub (recipe, data, accuracy,
    versions, how to load), and the recipe. What was written is read back, and its outputs are
    compared with the model's. For timm there is also a config.json, from which timm.create_model
    makes the model. onnx needs largebatch[onnx].

    \b
      largebatch export runs/digits/2026-01-31_10-00-00 --to timm --out export
      largebatch export RUN --ema --to onnx --out export-onnx
    """
    from ..schema.load import load
    from ..trained.export import check
    from ..trained.export import export as write
    from ..trained.source import open_trained

    if recipe is not None:
        check(to, load(recipe).recipe.model.name, out)
    trained = open_trained(run, recipe=recipe, ema=ema, trust_code=trust_code)
    target = check(to, trained.loaded.recipe.model.name, out)
    checked = write(trained, target, out)
    for line in trained.notices:
        typer.echo(line, err=True)
    print(checked)
    for path in sorted(out.iterdir()):
        print(path)
