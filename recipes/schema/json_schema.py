"""Write the JSON schema of a recipe, for editors and for the completion of keys.

    python -m largebatch.recipes.schema.json_schema

writes ``configs/recipe.schema.json``, after a change to the schema. It is in draft 7, which
editors know best. A recipe that ``extends`` another may leave out the keys that are required.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from ...lars import Span
from .keys import SCHEMA
from .recipe import Recipe
from .types import span_as_plain

#: pydantic's names of limits that validators of ours stand before, and those of JSON schema.
_LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}

_EXTENDS = {
    "type": "string",
    "description": "Name or path of the recipe whose values this one starts from.",
}


class _Generator(GenerateJsonSchema):
    """pydantic's generator, without titles of keys, and with lengths as they are written."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def encode_default(self, dft: Any) -> Any:
        return span_as_plain(dft) if isinstance(dft, Span) else super().encode_default(dft)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file."""
    content = _standard(Recipe.model_json_schema(schema_generator=_Generator))
    sections = content.pop("$defs")
    required = {"required": content.pop("required"), "properties": {}}
    for name, key in content["properties"].items():
        if "$ref" in key:
            key.pop("default", None)  # that of its keys
            section = sections[key["$ref"].rpartition("/")[2]]
            if "required" in section:
                required["properties"][name] = {"required": section.pop("required")}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of largebatch",
        "type": "object",
        "properties": {"extends": _EXTENDS, **content["properties"]},
        "additionalProperties": False,
        "if": {"not": {"required": ["extends"]}},
        "then": required,
        "$defs": sections,
    }


def text() -> str:
    """The JSON schema as the file holds it."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _standard(node: Any) -> Any:
    """A schema of pydantic in the words of draft 7."""
    if isinstance(node, list):
        return [_standard(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    found = {_LIMITS.get(name, name): _standard(inner) for name, inner in node.items()}
    if "prefixItems" in found:  # tuples here hold values of one type
        found["items"] = found.pop("prefixItems")[0]
    return found


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
