"""Recipes of which one value is of another type or beyond all bounds: valid, or one line."""

from contextlib import suppress

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.keys import all_keys
from largebatch.recipes.schema.load import Loaded, dump, load

WHOLE = {name: dump(load(name).recipe) for name in ("digits", "resnet50-b65536")}
KEYS = sorted(key.name for key in all_keys() if "[]" not in key.name)
VALUES = (
    *(None, True, -1, 0, 1e300, -1e300, float("nan"), float("inf"), 10**400, -(10**18), 2**70),
    *("", "x", "1ep", "-1ep", "0dur", "1e300ep", "9" * 400, "9" * 400 + "ep", "a.b:c", "\x1b"),
    *([], [[]], [None], [{}], [{"from": 0}], ["x"], {}, {"a": 1}, {1: 2}, {"name": []}),
)


@given(st.sampled_from(sorted(WHOLE)), st.sampled_from(KEYS), st.sampled_from(VALUES))
@settings(deadline=None, max_examples=40)
def test_a_recipe_with_a_damaged_value_is_valid_or_refused(tmp_path_factory, name, key, value):
    path = tmp_path_factory.getbasetemp() / "mine.yaml"
    *sections, last = key.split(".")
    inside = content = yaml.safe_load(WHOLE[name])
    for section in sections:
        inside = inside.setdefault(section, {}) or {}
    inside[last] = value
    path.write_text(yaml.safe_dump(content))
    with suppress(RecipeError):
        assert isinstance(load(str(path)), Loaded)


@pytest.mark.parametrize(
    "text",
    ["[" * 10_000, "{a: " * 10_000, "- " * 10_000, "a: &a [*a, *a]", "a: !!int ''", "a: !!bool x"],
)
def test_text_that_is_no_recipe_is_refused(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match="not YAML in UTF-8: "):
        load(str(path))
