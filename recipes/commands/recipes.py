"""The commands ``largebatch recipes``: list them, show one, explain the keys."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..errors import RecipeError, but_valid
from .options import Overrides, RecipeName

recipes_app = typer.Typer(
    help="List the recipes, show one, or explain the keys.\n\n"
    "Without a command, the recipes are listed.",
    rich_markup_mode=None,
)

#: A list for a file or pipe is this wide, as one for a terminal of that width.
_WIDE = 160


@recipes_app.callback(invoke_without_command=True)
def _list_by_default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_recipes()


@recipes_app.command("list")
def list_recipes() -> None:
    """List the recipes that come with the package."""
    from rich.console import Console
    from rich.table import Table

    from ..schema.catalogue import entries, families

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    found = entries()
    table = Table("ImageNet", box=None, pad_edge=False)
    table.add_column("epochs", justify="right")
    table.add_column("what it is")
    table.add_column("expected top-1", no_wrap=True)
    for entry in found:
        if entry.is_imagenet:
            top1 = entry.top1 if entry.is_trained_here else f"{entry.top1} *"
            table.add_row(entry.name, f"{entry.recipe.epochs:g}", entry.what, top1)
    table.columns[0].no_wrap = True
    console.print(table)
    console.print("* as published; not trained here\n")
    table = Table("smaller data sets", "what they are", "top-1, trained here", box=None)
    table.pad_edge = False
    for family in families(entry for entry in found if not entry.is_imagenet):
        table.add_row(*family)
    console.print(table)


@recipes_app.command()
def show(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Print a recipe with every key and the overrides applied."""
    from ..schema.load import dump, load

    loaded = load(recipe, overrides or [])
    print("\n".join(f"# {s}".rstrip() for s in (*loaded.head.splitlines(), *loaded.notices)))
    print(dump(loaded.recipe), end="")


@recipes_app.command("keys")
def explain_keys(
    section: Annotated[
        str | None,
        typer.Argument(
            metavar="SECTION",
            help="A section such as optimizer, or a key such as batch_size; all by default.",
        ),
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the JSON schema of a recipe, for editors.")
    ] = False,
) -> None:
    """Explain the keys of a recipe: type, default and meaning.

    An editor with a YAML language server checks and completes a recipe that begins with the line

    \b
      # yaml-language-server: $schema=recipe.schema.json

    after `largebatch recipes keys --json > recipe.schema.json`.
    """
    import functools
    import json
    import shutil
    import textwrap

    from ..schema.keys import LENGTHS, all_keys, schema, sections

    if json_:
        print(json.dumps(schema(), indent=2))
        return
    shown = [key for key in all_keys() if section in (None, key.section, key.name)]
    if not shown:
        names = [*sections(), *(key.name for key in all_keys() if not key.section)]
        hint = but_valid(section or "", names)
        raise RecipeError(f"unknown section {section!r}{hint}: {', '.join(sections())}")
    width = min(shutil.get_terminal_size().columns, 100)
    filled = functools.partial(textwrap.fill, width=width)
    last = ""
    for key in shown:
        if key.section != last:
            print(f"\n{filled(f'{key.section}: {sections()[key.section]}')}\n")
            last = key.section
        default = "required" if key.default is None else f"default {key.default}"
        print(filled(f"{key.name}: {key.type}; {default}", subsequent_indent="    "))
        print(filled(key.meaning, initial_indent="    ", subsequent_indent="    "))
    if any("length" in key.type for key in shown):
        print(f"\n{filled(LENGTHS)}")
