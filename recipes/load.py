"""Find a recipe, follow what it extends, apply overrides, and check it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from .errors import RecipeError, did_you_mean
from .schema import Recipe, expand_resume

CONFIGS = Path(__file__).parent / "configs"

#: A run's folder holds its recipe under this name.
RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class Loaded:
    """A recipe as it will run.

    Attributes:
        name: of its file, without the ending.
        head: its head comment, without the number signs.
        recipe: checked.
    """

    name: str
    head: str
    recipe: Recipe


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def load(name: str, overrides: Iterable[str] = ()) -> Loaded:
    """Load a recipe by name, or by the path of a YAML file.

    Args:
        name: of a recipe that comes with the package, or a path that ends in ``.yaml``.
        overrides: ``key=value``, with dots into sections; values are YAML.

    Raises:
        RecipeError: no such recipe, or one that is not valid; the message names the key and says
            what would be.
    """
    path = _find(name, CONFIGS)
    content = _read(path, ())
    for override in overrides:
        _override(content, override)
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(f"recipe {path.stem}: {_explain(error)}") from None
    return Loaded(path.stem, _head(path), recipe)


def dump(recipe: Recipe) -> str:
    """The recipe as YAML, with every key; :func:`load` reads it back."""
    content = recipe.model_dump(mode="json", by_alias=True)
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


def _find(name: str, folder: Path) -> Path:
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / f"{name}.yaml"
    if not path.is_absolute() and not path.exists():
        path = folder / path
    if not path.is_file():
        known = recipe_names()
        raise RecipeError(
            f"unknown recipe {name!r}{did_you_mean(name, known)} "
            f"Valid: {', '.join(known)}, or the path of a .yaml file"
        )
    return path


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """The content of a recipe file, merged over what it extends."""
    if path in above:
        chain = " -> ".join(p.name for p in (*above, path))
        raise RecipeError(f"recipe {path}: extends itself: {chain}")
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {path}: not YAML: {error}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"recipe {path}: must be keys and values")
    base = content.pop("extends", None)
    if base is None:
        return content
    return _merge(_read(_find(str(base), path.parent), (*above, path)), content)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _override(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(f"override {override!r} is not of the form key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if parts[0] == "resume":  # a section that may be written short, before or after its keys
        content["resume"] = expand_resume(content.get("resume", {}))
        value = expand_resume(value) if len(parts) == 1 else value
    over = value
    for part in reversed(parts):
        over = {part: over}
    content.update(_merge(content, over))


def _explain(error: ValidationError) -> str:
    """The first thing wrong, in one line."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    key = ".".join(where)
    if first["type"] == "extra_forbidden":
        section = _section(where[:-1])
        valid = [field.alias or name for name, field in section.model_fields.items()]
        full = [".".join([*where[:-1], name]) for name in valid]
        return f"unknown key {key!r}{did_you_mean(key, full)} Valid: {', '.join(valid)}"
    if first["type"] == "missing":
        return f"the key {key!r} is missing"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        if isinstance(first["input"], dict):  # raised by a section's own check: "key: what"
            inner, _, message = message.partition(": ")
            key = ".".join([*where, inner])
        return f"{key}: {message}"
    given = "" if isinstance(first["input"], dict) else f", not {first['input']!r}"
    return f"{key}: {message[0].lower()}{message[1:]}{given}"


def _section(where: list[str]) -> type[BaseModel]:
    section: type[BaseModel] = Recipe
    for part in where:
        annotation: Any = section.model_fields[part].annotation
        section = annotation
    return section


def _head(path: Path) -> str:
    lines = path.read_text().splitlines()
    head = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in head)


def default_run_dir(name: str, started: str) -> Path:
    """``runs/<recipe>/<date and time>``."""
    return Path("runs") / name / started


def latest_run(name: str) -> Path | None:
    """The newest run of a recipe in its default place."""
    folder = Path("runs") / name
    runs = sorted(e.name for e in os.scandir(folder) if e.is_dir()) if folder.is_dir() else []
    return folder / runs[-1] if runs else None
