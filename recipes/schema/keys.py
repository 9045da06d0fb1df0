"""The keys of a recipe: type, default and meaning, and the JSON schema that editors use.

The schema is pydantic's own, with two changes: a recipe may name one that it ``extends``, and no
key is required, as that one may have it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from ...lars import Span
from .optimizers import users
from .recipe import Recipe
from .types import span_as_plain

#: How the values of type "length" are written.
LENGTHS = (
    "A length is a number of epochs (`5ep`), a number of steps (`500`) or a fraction of the run "
    "(`0.1dur`)."
)

#: The key of a file that is none of the recipe.
EXTENDS = "extends"
_EXTENDS = {
    "anyOf": [{"type": "string"}, {"type": "null"}],
    "default": None,
    "description": "Name or path of the recipe whose values this one starts from.",
}


@dataclass(frozen=True)
class Key:
    """A key of a recipe."""

    name: str  # as in an override, such as ``optimizer.lr``; in entries of a list ``stages[].lr``
    type: str  # in words
    default: str | None  # as an override gives it; None: the key is required
    meaning: str

    @property
    def section(self) -> str:
        """Name of the section, empty for keys at the top level."""
        return self.name.rpartition(".")[0].removesuffix("[]")


class _Generator(GenerateJsonSchema):
    """pydantic's generator, with lengths as they are written, and without titles of keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def encode_default(self, dft: Any) -> Any:
        return span_as_plain(dft) if isinstance(dft, Span) else super().encode_default(dft)


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON schema of a recipe."""
    content = Recipe.model_json_schema(schema_generator=_Generator)
    for section in (content, *content["$defs"].values()):
        section.pop("required", None)
        for name, key in section["properties"].items():
            if "description" in key:  # of several lines, as in the source
                text = " ".join(key["description"].split())
                key["description"] = text.replace("{users}", users(name))
    content["properties"] = {EXTENDS: _EXTENDS, **content["properties"]}
    return content


@functools.cache
def all_keys() -> tuple[Key, ...]:
    """All keys in the order of the schema, those at the top level first."""
    return tuple(sorted(_keys(schema(), ""), key=lambda key: bool(key.section)))


@functools.cache
def sections() -> dict[str, str]:
    """Name and meaning of each section, in the order of the schema."""
    found = {name: _section(node) for name, node in schema()["properties"].items()}
    return {name: section["description"] for name, section in found.items() if section}


def _keys(node: dict[str, Any], prefix: str) -> Iterator[Key]:
    for name, key in node["properties"].items():
        section = _section(key)
        is_list = any(form.get("type") == "array" for form in _forms(key))
        if section is None or is_list:
            yield Key(
                name=prefix + name,
                type=_type(key),
                default=_default(key["default"]) if "default" in key else None,
                meaning=key["description"],
            )
        if section is not None:
            yield from _keys(section, f"{prefix}{name}{'[]' * is_list}.")


def _forms(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a key may be, and what the entries of a list may be."""
    for form in node.get("anyOf", (node,)):
        yield form
        if "items" in form:
            yield from _forms(form["items"])


def _section(node: dict[str, Any]) -> dict[str, Any] | None:
    """The section that a key or the entries of a list may be; None if they are values."""
    names = [form["$ref"] for form in _forms(node) if "$ref" in form]
    return schema()["$defs"][names[0].rpartition("/")[2]] if names else None


def _type(node: dict[str, Any], many: bool = False) -> str:
    """A type in words, in the plural if ``many``."""
    plural = "s" if many else ""
    if "$ref" in node:
        words = re.sub(r"\B(?=[A-Z][a-z])", " ", node["$ref"].rpartition("/")[2])
        return f"{words.lower()}{plural}"
    if node.get("format") == "length":
        return "length" + plural
    if _names(node):
        return f"{'any' if many else 'one'} of {', '.join(_names(node))}"
    if "anyOf" in node:
        parts = [_type(inner, many) for inner in node["anyOf"]]
        if parts[1:] == ["null"] and _names(node["anyOf"][0]):
            return ", ".join(parts)
        return (", or " if any("," in part for part in parts) else " or ").join(parts)
    if "type" not in node:
        return "any value"
    if node["type"] == "array":
        count = f"{node['maxItems']} " if "maxItems" in node else ""
        entry = node.get("items") or node["prefixItems"][0]  # of which all are of one type
        return f"list of {count}{_type(entry, many=True)}"
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    limits = (
        f"{sign} {node[name]:g}"
        for name, sign in signs.items()
        if name in node and abs(node[name]) < 2**53
    )
    word = {"object": "mapping"}.get(node["type"], node["type"])
    return f"{word}{plural if word != 'null' else ''} {', '.join(limits)}".rstrip()


def _default(value: Any) -> str:
    if isinstance(value, list):
        value = [round(v, 4) if isinstance(v, float) else v for v in value]
    return value if isinstance(value, str) else json.dumps(value)


def _names(node: dict[str, Any]) -> list[str]:
    """The names that a key takes, if it takes only some."""
    return [str(name) for name in node.get("enum", [node["const"]] if "const" in node else [])]
