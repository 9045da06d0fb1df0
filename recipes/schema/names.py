"""The recipes that come with the package: their folder and their names.

Imports nothing heavy, so that names can be completed at once.
"""

from __future__ import annotations

from pathlib import Path

#: The folder of the packaged recipes, and of the JSON schema of a recipe.
CONFIGS = Path(__file__).parents[1] / "configs"

#: Name of the file that holds the recipe of a run, in the run's folder.
RECIPE = "recipe.yaml"


def recipe_names() -> list[str]:
    """Names of the packaged recipes, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))
