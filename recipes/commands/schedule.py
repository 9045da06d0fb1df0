"""The command ``largebatch schedule``."""

from __future__ import annotations

from .options import Overrides, Picture, RecipeName, check_picture


def schedule(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Picture = None,
) -> None:
    """Print a recipe's learning rate at its key points.

    --out plots it. The number of images is counted in the data folder if there is one, and else
    taken from data.train_images. A step is one update of the weights.
    """
    from ..errors import exit_on_user_error
    from ..predict.schedule import draw, outline, print_summary
    from ..schema.load import load

    with exit_on_user_error():
        if out is not None:
            check_picture(out)
        found = outline(load(recipe, overrides or []))
        if out is not None:
            draw(found, out)
    print_summary(found)
    if out is not None:
        print(out)
