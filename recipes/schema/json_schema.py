"""Write the JSON schema of a recipe, for editors and for ``largebatch recipes keys``.

    python -m largebatch.recipes.schema.json_schema

writes ``configs/recipe.schema.json``, after a change to the schema. It is pydantic's own, with two
changes: a recipe may name one that it ``extends``, and no key is required, as that one may have it.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from ...lars import Span
from .keys import SCHEMA
from .recipe import Recipe
from .types import span_as_plain

_EXTENDS = {
    "anyOf": [{"type": "string"}, {"type": "null"}],
    "default": None,
    "description": "Name or path of the recipe whose values this one starts from.",
}


class _Generator(GenerateJsonSchema):
    """pydantic's generator, with lengths as they are written, and without titles of keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def encode_default(self, dft: Any) -> Any:
        return span_as_plain(dft) if isinstance(dft, Span) else super().encode_default(dft)


def text() -> str:
    """The JSON schema as the file holds it."""
    content = Recipe.model_json_schema(schema_generator=_Generator)
    for section in (content, *content["$defs"].values()):
        section.pop("required", None)
    content["properties"] = {"extends": _EXTENDS, **content["properties"]}
    return json.dumps(content, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
