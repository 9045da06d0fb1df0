"""Recipes and the trainer that runs them. Needs ``largebatch[recipes]``."""

from typing import TYPE_CHECKING

from .._lazy import lazily

if TYPE_CHECKING:
    from .errors import RecipeError
    from .schema.load import load
    from .schema.names import recipe_names
    from .schema.recipe import Recipe
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = ["Recipe", "RecipeError", "load", "recipe_names"]
