"""The command ``largebatch schedule``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import RecipeError
from .options import Overrides, RecipeName


def schedule(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture to write: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Print a recipe's learning rate at its key points.

    --out plots it. The number of images is counted in the data folder if there is one, and else
    taken from data.train_images. A step is one update of the weights.
    """
    from ..predict.schedule import draw, outline, print_summary
    from ..schema.load import load

    if out is not None and out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise RecipeError(f"--out: cannot write {out}; valid: a name with .png, .svg or .pdf")
    if out is not None and not out.parent.is_dir():
        raise RecipeError(f"--out: no folder {out.parent} for {out.name}; valid: one that exists")
    found = outline(load(recipe, overrides or []))
    if out is not None:
        draw(found, out)
    print_summary(found)
    if out is not None:
        print(out)
