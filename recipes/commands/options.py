"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from .completion import complete_override, complete_recipe

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
        autocompletion=complete_override,
    ),
]
