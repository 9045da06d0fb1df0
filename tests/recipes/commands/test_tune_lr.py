"""The command ``largebatch tune lr``."""

import json

import pytest

from largebatch.recipes.schema.load import load
from tests.recipes.commands.test_app import run
from tests.recipes.runs import BASE


def small(photos):
    return ["digits", *BASE, f"data.path={photos}", "data.holdout=13", "epochs=1"]


@pytest.mark.slow("trains eight short runs")
def test_a_search_ends_with_a_picture_and_a_recipe(photos, tmp_path):
    """With real runs."""
    options = ["--runs", 8, "--out", tmp_path / "study"]
    result = run("tune", "lr", *small(photos), *options)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[0].endswith("8 fit into 8 runs")
    assert result.stderr.count(" trial ") >= 8
    lines = result.stdout.splitlines()
    assert lines[0].startswith("digits: ")
    assert " trials, " in lines[0]
    assert lines[1].startswith("best: learning rate ")
    assert lines[-1] == f"train it: largebatch train {tmp_path / 'study' / 'recipe.yaml'}"
    for name in ("trials.png", "trials.json", "recipe.yaml"):
        assert str(tmp_path / "study" / name) in lines
    best = json.loads((tmp_path / "study" / "trials.json").read_text())["best"]
    tuned = load(str(tmp_path / "study" / "recipe.yaml")).recipe
    assert (tuned.optimizer.lr, tuned.epochs) == (best["lr"], 1)
    assert tuned.data.holdout is None
