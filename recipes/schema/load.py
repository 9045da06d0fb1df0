"""Find a recipe, merge what it extends, apply overrides, and validate it."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ...pipeline import without_secrets
from ..errors import RecipeError, but_valid
from ..files import DamagedFileError, parse_yaml, read_text
from ..published import with_normalization
from .explain import explain
from .lr_scaling import RULES, scaled
from .names import CONFIGS, recipe_name, recipe_names
from .names import RECIPE as RECIPE
from .optimizers import of_others
from .recipe import Recipe
from .retired import without_retired
from .sections import expand_resume


@dataclass(frozen=True)
class Loaded:
    """A validated recipe, and where it comes from."""

    name: str  # of its file, or as it was called; in a run's folder, of the recipe that ran
    head: str  # the head comment of the file, without the number signs
    recipe: Recipe
    notices: tuple[str, ...] = ()  # lines to show, such as how the learning rate was scaled


def load(name: str, overrides: Iterable[str] = (), *, asks_timm: bool = True) -> Loaded:
    """Load a recipe by its name or by the path of its YAML file.

    Args:
        name: Name of a packaged recipe, or a path that ends in ``.yaml``.
        overrides: ``key=value``, with dots for keys of sections; values are YAML.
        asks_timm: Whether to fill in ``data.mean`` and ``data.std`` of published weights, for which
            timm is imported.

    Raises:
        RecipeError: The recipe is unknown or invalid; the message names the key and what would be
            valid.
    """
    path = find(name)
    levels = _levels(path, ())
    text = read_text(path)
    called = path.stem  # of `recipe.yaml` that which ran, or else the folder's
    if path.name == RECIPE:
        called = recipe_name(text) or path.absolute().parent.name
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    head = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
    return _load(levels, overrides, called, head, asks_timm=asks_timm)


def load_content(content: dict[str, Any], overrides: Iterable[str] = (), *, called: str) -> Loaded:
    """Load a recipe that is in no file: ``content`` has the keys and values of one."""
    return _load([content], overrides, called, "")


def _load(
    levels: Iterable[dict[str, Any]],
    overrides: Iterable[str],
    called: str,
    head: str,
    *,
    asks_timm: bool = True,
) -> Loaded:
    base: dict[str, Any] = {}
    notices: tuple[str, ...] = ()
    for level in levels:
        base = _without_args_of_another(base, level)
        base, notices = scaled(base, level, _merge(base, level), notices)
    overrides = list(overrides)
    level = nested(overrides)
    whole, base = base, _without_args_of_another(base, level)
    content = dict(base)
    for override in overrides:
        _override(content, override)
    content, notices = scaled(base, level, content, notices)
    if content.get("scale") in RULES:  # so that a saved recipe is not scaled again
        content = {**content, "scale": None}
    if asks_timm:
        content, notices = with_normalization(content, notices)
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(f"recipe {called}: {explain(error)}") from None
    if base is not whole and whole["optimizer"]["args"]:
        now = recipe.optimizer.name
        notices += (f"optimizer.args of {called} are dropped: optimizer.name is now {now}",)
    notices += of_others(recipe.optimizer.name, (key.partition("=")[0] for key in overrides))
    return Loaded(called, head, recipe, notices)


def nested(overrides: Iterable[str]) -> dict[str, Any]:
    """The keys and values of overrides, in sections as a recipe file has them."""
    level: dict[str, Any] = {}
    for override in overrides:
        _override(level, override)
    return level


def override(key: str, text: str) -> str:
    """Return the override that sets ``key`` to ``text``, which is quoted where YAML needs that."""
    for form in (text, json.dumps(text, ensure_ascii=False), json.dumps(text)):
        with suppress(DamagedFileError):
            if parse_yaml(form, _Loader) == text:
                return f"{key}={form}"
    return f"{key}={text}"  # not YAML in any form, and then taken as it is


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every key; :func:`load` reads it back."""
    content = recipe.model_dump(mode="json", by_alias=True)
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


def find(name: str, folder: Path = Path()) -> Path:
    """The file of a recipe: a path relative to ``folder``, or the name of a packaged recipe."""
    is_path = name.endswith((".yaml", ".yml"))
    places = [folder / name, CONFIGS / name] if is_path else [CONFIGS / f"{name}.yaml"]
    for path in places:
        if os.path.isfile(path):
            return path
    known = recipe_names()
    raise RecipeError(
        f"unknown recipe {name!r}{but_valid(name, known, most=5)}: those of `largebatch recipes`, "
        "or the path of a .yaml file"
    )


def _levels(path: Path, above: tuple[Path, ...]) -> list[dict[str, Any]]:
    """The contents of a recipe file and of those that it extends, the base first."""
    chain = (*above, path.resolve())
    if chain[-1] in above:
        raise RecipeError(f"recipe {path}: extends itself: {' -> '.join(p.name for p in chain)}")
    try:
        content = parse_yaml(read_text(path), _Loader)
    except OSError as error:
        raise RecipeError(f"recipe {path}: cannot be read: {error.strerror}") from None
    except DamagedFileError as error:
        raise RecipeError(f"recipe {path}: not YAML in UTF-8: {error}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"recipe {path}: no keys found; valid: lines such as `epochs: 90`")
    if path.name == RECIPE:
        content = without_retired(content)
    base = content.pop("extends", None)
    below = [] if base is None else _levels(find(str(base), path.parent), chain)
    return [*below, content]


#: What YAML 1.1 makes of text, and YAML 1.2 does not or in another form.
_REPLACED = ("timestamp", "int", "float")


class _Loader(yaml.SafeLoader):
    """YAML in which duplicate keys are errors, and dates and times are text.

    Numbers are as in YAML 1.2: 1e-8 is one, 12:30:45 and 010 are not 45,045 and 8.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, form) for tag, form in forms if tag.rpartition(":")[2] not in _REPLACED]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: list[Any] = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark
                )
            seen.append(key.value)
        return node


_INT = r"(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)$"
_FLOAT = (
    r"(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
for _tag, _form in (("int", _INT), ("float", _FLOAT)):
    _tag = f"tag:yaml.org,2002:{_tag}"
    _Loader.add_implicit_resolver(_tag, re.compile(_form), list("-+0123456789."))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _without_args_of_another(base: dict[str, Any], level: dict[str, Any]) -> dict[str, Any]:
    """``base`` without ``optimizer.args`` if the level above names another optimizer."""
    below, own = base.get("optimizer"), level.get("optimizer")
    if not (isinstance(below, dict) and isinstance(own, dict) and "args" in below):
        return base
    now = below.get("name", "lars")
    if own.get("name", now) == now:
        return base
    return {**base, "optimizer": {k: v for k, v in below.items() if k != "args"}}


def _override(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        shown = without_secrets(override)
        raise RecipeError(f"override {shown!r} is malformed; valid: key=value")
    try:
        value = parse_yaml(text, _Loader)
    except DamagedFileError:
        value = text
    if parts[0] == "resume":  # its short forms may come before or after its keys
        content["resume"] = expand_resume(content.get("resume", {}))
        value = expand_resume(value) if len(parts) == 1 else value
    over = value
    for part in reversed(parts):
        over = {part: over}
    content.update(_merge(content, over))


def latest_run(name: str) -> Path | None:
    """The newest run of a recipe in its default folder, None if there is none."""
    folder = Path("runs") / name
    runs = sorted(e.name for e in os.scandir(folder) if e.is_dir()) if folder.is_dir() else []
    return folder / runs[-1] if runs else None


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """List the changed keys, one line each, except ``run_dir``, ``resume`` and ``stop_after``."""
    lines = []
    for key in new:
        before, now = old.get(key), new[key]
        if before == now or prefix + key in ("run_dir", "resume", "stop_after"):
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            lines += differences(before, now, f"{prefix}{key}.")
        else:
            lines.append(f"{prefix}{key} is now {json.dumps(now)}, was {json.dumps(before)}")
    return lines


#: The keys without a default, and a source that needs no path.
_LEAST = yaml.safe_load(
    "{model: {name: ''}, data: {source: synthetic}, optimizer: {lr: 1}, batch_size: 1, epochs: 1}"
)


def with_defaults(old: dict[str, Any]) -> dict[str, Any]:
    """The recipe of an earlier version in today's keys: those that it lacks at their defaults.

    That version did what these defaults say.

    Raises:
        RecipeError: A retired key has another value than by default.
    """
    defaults = Recipe.model_validate(_LEAST).model_dump(mode="json", by_alias=True)
    return _merge(defaults, without_retired(old))
