"""What to train, and the trainer that runs it. Needs ``largebatch[recipes]``."""

from .errors import RecipeError
from .schema.load import load, recipe_names
from .schema.recipe import Recipe

__all__ = ["Recipe", "RecipeError", "load", "recipe_names"]
