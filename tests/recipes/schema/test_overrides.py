"""Overrides that are built from text read back as the same text, and keys that went."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import dump, load, override

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


def test_a_run_of_an_earlier_version_is_read_without_the_keys_that_went(tmp_path):
    content = yaml.safe_load(dump(load("digits").recipe)) | {"cuda_graph": False}
    content["ema"] |= {"every": 1, "warmup": True}
    content["profile"] |= {"memory": False, "shapes": False, "stacks": False}
    content["batch_norm"]["over"] = "rank"  # which was the default under another name
    lines = yaml.safe_dump(content)
    (tmp_path / "recipe.yaml").write_text("# The recipe digits as it ran.\n" + lines)
    assert load(str(tmp_path / "recipe.yaml")).recipe == load("digits").recipe
    (tmp_path / "mine.yaml").write_text(lines)
    with pytest.raises(RecipeError, match=r"unknown key|batch_norm\.over"):
        load(str(tmp_path / "mine.yaml"))
