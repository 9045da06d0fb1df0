"""Values in recipes and overrides: as in YAML 1.2, as they were written, valid or refused."""

import math
from contextlib import suppress

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.keys import all_keys
from largebatch.recipes.schema.load import Loaded, dump, load, nested, override

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
    ("text", "value"),
    [
        *(("5", 5), ("+3", 3), ("-0", 0), ("1_000", 1000), ("0x10", 16)),
        *(("1e-8", 1e-8), ("1.5E3", 1500.0), ("1.", 1.0), (".5", 0.5), ("-0.5", -0.5)),
        *((".inf", math.inf), ("true", True), ("null", None)),
        # Numbers of YAML 1.1 only: of base 60, and octal.
        *(("12:30:45", "12:30:45"), ("1:2.5", "1:2.5"), ("010", "010"), ("2001-01-01",) * 2),
    ],
)
def test_numbers_are_those_of_yaml_1_2(text, value):
    found = nested([f"a={text}"])["a"]
    assert found == value
    assert type(found) is type(value)


@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"])))
@example("null")
@example("2024")
@example(" a #b")
@example("a: \x85")
@example("a\nb\x7f")
@example("\U0001f600 #b")
def test_any_text_reads_back(text):
    assert load("digits", [override("run_dir", text)]).recipe.run_dir == text


def test_plain_text_stays_plain():
    assert override("run_dir", "runs/a run") == "run_dir=runs/a run"
