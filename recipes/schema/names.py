"""The recipes that come with the package: their folder and their names.

Imports nothing heavy, so that the command line has the names at once.
"""

from __future__ import annotations

import re
from pathlib import Path

#: The folder of the packaged recipes.
CONFIGS = Path(__file__).parents[1] / "configs"

#: Name of the file that holds the recipe of a run, in the run's folder.
RECIPE = "recipe.yaml"

#: Its first line, which ``write_recipe`` writes.
_RAN = re.compile(r"# The recipe (.+) as it ran\.")


def recipe_names() -> list[str]:
    """Names of the packaged recipes, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def recipe_name(text: str) -> str | None:
    """The name of the recipe in a run's folder, from the text of its file; None if it has none."""
    named = _RAN.match(text)
    return named[1] if named else None
