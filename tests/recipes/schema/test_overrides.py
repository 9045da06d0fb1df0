"""Overrides that are built from text read back as the same text."""

from hypothesis import example, given
from hypothesis import strategies as st

from largebatch.recipes.schema.load import load, override


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
