"""Dotted paths such as ``mypkg.module:factory``, by which a recipe names a user's own code."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator

from ..errors import RecipeError, but_valid

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_dotted_path(name: str) -> bool:
    """Whether ``name`` is meant as a dotted path, and not as a name of ours or of a library."""
    return ":" in name


def _well_formed(path: str) -> str:
    if not _FORM.fullmatch(path):
        raise ValueError(f"{path!r} is not a dotted path; valid: such as mypkg.module:factory")
    return path


DottedPath = Annotated[str, AfterValidator(_well_formed)]
#: A name, or a dotted path.
NameOrPath = Annotated[
    str, AfterValidator(lambda name: _well_formed(name) if is_dotted_path(name) else name)
]


def resolve(path: str, key: str) -> Callable[..., Any]:
    """Import what a dotted path ``module:name`` names; ``key`` is that of the recipe that holds it.

    The current folder is searched last, as ``python -m`` and torchrun search it, so that a path
    means the same with the command ``largebatch``.
    """
    module_name, _, attribute = path.partition(":")
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise RecipeError(
                f"{key}: no module {missing!r} for {path}; valid: a module that is installed, "
                "on PYTHONPATH or in the current folder"
            ) from None
        raise RecipeError(
            f"{key}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(found) if not name.startswith("_")]
            raise RecipeError(
                f"{key}: {module_name} has no {attribute!r}{but_valid(part, names)}: "
                "a class or function of that module"
            )
        found = getattr(found, part)
    if not callable(found):
        raise RecipeError(
            f"{key}: {path} is of type {type(found).__name__}; valid: a class or function"
        )
    return found  # type: ignore[no-any-return]
