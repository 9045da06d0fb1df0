"""The command ``largebatch schedule``."""

from __future__ import annotations

from pathlib import Path

from .options import Overrides, Picture, RecipeName, check_picture


def schedule(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Picture = Path("schedule.png"),
) -> None:
    """Plot a recipe's learning rate, and print its key points.

    The number of images is counted in the data folder if there is one, and else taken from
    data.train_images. A step is one update of the weights.
    """
    from ..errors import exit_on_user_error
    from ..predict.schedule import draw, outline, print_summary
    from ..schema.load import load

    with exit_on_user_error():
        check_picture(out)
        found = outline(load(recipe, overrides or []))
        draw(found, out)
    print_summary(found)
    print(out)
