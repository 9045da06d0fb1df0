"""Complete recipes, keys and values on TAB. Imports nothing heavy.

A shell asks for the words that may follow what has been typed. bash splits words at ``=``: for
``precision=b`` it asks about ``b`` after the words ``precision`` and ``=``, and expects ``bf16``;
other shells ask about the whole word and expect ``precision=bf16``.
"""

from __future__ import annotations

import os

import typer

from ..schema.keys import Key, all_keys, sections
from ..schema.names import recipe_names

#: A completion, optionally with a description, which shells other than bash show next to it.
Item = str | tuple[str, str]


def complete_recipe(incomplete: str) -> list[str]:
    """Names of packaged recipes, and paths of YAML files."""
    names = [name for name in recipe_names() if name.startswith(incomplete)]
    return [*names, *_paths(incomplete)]


def complete_override(context: typer.Context, incomplete: str) -> list[Item]:
    """Keys with their equals sign, or the values of a key that has a fixed set of them."""
    before = [str(word) for word in context.params.get("overrides") or ()]
    if before[-1:] == ["="]:  # bash, in the value
        return _of_key(before[-2], incomplete, "") if before[1:] else []
    if before and not incomplete and "=" not in before[-1]:  # bash, right after the sign
        return _of_key(before[-1], "", "")
    key, equals, text = incomplete.partition("=")
    if equals:
        return _of_key(key, text, f"{key}=")
    found = [k for k in all_keys() if k.name.startswith(key) and _may_override(k)]
    if len(found) == 1:  # with its values, so that the shell adds no space after the sign
        only = found[0]
        values = only.values or ((only.default,) if only.default else ("VALUE",))
        return [f"{only.name}=", *(f"{only.name}={value}" for value in values)]
    return [(f"{k.name}=", k.meaning) for k in found]


def complete_section(incomplete: str) -> list[Item]:
    """Sections of a recipe, and its keys at the top level."""
    top = [(key.name, key.meaning) for key in all_keys() if not key.section]
    found = {**dict(top), **sections()}
    return [(name, text) for name, text in found.items() if name.startswith(incomplete)]


def _may_override(key: Key) -> bool:
    return key.name != "extends" and "[]" not in key.name


def _of_key(name: str, text: str, prefix: str) -> list[Item]:
    """The values of a key that begin with ``text``, after a prefix."""
    values = next((key.values for key in all_keys() if key.name == name), ())
    return [prefix + value for value in values if value.startswith(text)]


def _paths(start: str) -> list[str]:
    """YAML files and folders whose path begins with ``start``.

    A folder that is the only one is opened, so that the shell adds no space after it.
    """
    name = start.rpartition("/")[2]
    prefix = start.removesuffix(name)
    try:
        entries = sorted(os.scandir(prefix or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    shown = [e for e in entries if e.name.startswith(name) and (name or e.name[0] != ".")]
    found = [prefix + e.name for e in shown if e.name.endswith((".yaml", ".yml"))]
    folders = [f"{prefix}{e.name}/" for e in shown if e.is_dir()]
    if not start:
        return found
    if not found and len(folders) == 1:
        return [folders[0], *_paths(folders[0])]
    return found + folders
