"""Overrides that are built from text read back as the same text, and keys that went."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.schema.load import load, override

NAMES = [
    *("runs/a", "a #b", "null", "2024", "1e3", "true", "runs/2: a", "[x]", "[x", "{a", "", " a "),
    *(
        "it's",
        'say "a"',
        "a=b",
        "é",
        "\U0001f600 #b",
        "a\nb",
        "\x7f",
        "a: \x85",
        "- a",
        "*a",
        "!!x",
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_folder_reads_back(name):
    assert load("digits", [override("run_dir", name)]).recipe.run_dir == name


@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"])))
def test_any_printable_text_reads_back(text):
    assert load("digits", [override("run_dir", text)]).recipe.run_dir == text


def test_plain_text_stays_plain():
    assert override("run_dir", "runs/a run") == "run_dir=runs/a run"
