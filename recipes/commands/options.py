"""Arguments that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="Name of a recipe, or path of a .yaml file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, such as schedule.warmup=10ep."),
]
