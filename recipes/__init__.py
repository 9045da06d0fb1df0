"""Recipes and the trainer that runs them. Needs ``largebatch[recipes]``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import RecipeError
    from .schema.load import load
    from .schema.names import recipe_names
    from .schema.recipe import Recipe

__all__ = ["Recipe", "RecipeError", "load", "recipe_names"]

_MODULES = {
    "Recipe": ".schema.recipe",
    "RecipeError": ".errors",
    "load": ".schema.load",
    "recipe_names": ".schema.names",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
