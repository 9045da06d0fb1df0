"""Numbers in recipes: those of YAML 1.2, and integers of 64 bits."""

import math

import pytest

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import load, nested


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


@pytest.mark.parametrize("override", ["batch_size=12:30:45", "batch_size=010", f"seed={10**30}"])
def test_numbers_that_are_none_and_absurd_ones_are_refused(override):
    key = override.partition("=")[0]
    with pytest.raises(RecipeError) as error:
        load("digits", [override])
    assert f"{key}: " in str(error.value)
    assert "\n" not in str(error.value)
