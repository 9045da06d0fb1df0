"""The command ``largebatch tune precision``."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Overrides, RecipeName


def tune_precision(
    recipe: RecipeName,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of updates to watch.")] = 20,
) -> None:
    """Find the loss scale that FP16 needs.

    Trains the first steps of the recipe in FP32 in this process, without writing a run, and counts
    for each layer the gradients and updates that FP16 would flush to zero. Gradients shrink during
    training: resume=PATH starts from a checkpoint.
    """
    from ..tune import precision

    precision.tune_precision(recipe, overrides or [], steps)
