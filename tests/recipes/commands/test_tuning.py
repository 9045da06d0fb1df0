"""The commands ``largebatch tune lr`` and ``largebatch critical-batch``, as a user runs them."""

import json

import pytest

from largebatch.recipes.schema.load import load
from tests.recipes.commands.test_app import run
from tests.recipes.runs import BASE
from tests.recipes.tune.critical_batch.law import SMALL, Law


@pytest.mark.slow("trains eight short runs")
def test_a_search_ends_with_a_picture_and_a_recipe(photos, tmp_path):
    keys = [*BASE, f"data.path={photos}", "data.holdout=13", "epochs=1"]
    result = run("tune", "lr", "digits", *keys, "--runs", 8, "--out", tmp_path / "study")
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


def test_an_estimate_prints_a_table_and_writes_its_numbers(photos, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Law(8).install(monkeypatch)
    options = ["--batches", "2,4,8", "--epochs", "30", "--out", "mine"]
    result = run("critical-batch", "digits", *SMALL, f"data.path={photos}", *options)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "batch 2, 20 epochs, seed 0: training loss 0.1250, held-out" in result.output
    assert any(line.startswith("critical batch: 8 images (90 %:") for line in lines)
    rows = {line.split()[0]: line.split() for line in lines if line[:6].strip().isdigit()}
    assert list(rows) == ["2", "4", "8", "16"]
    assert rows["16"][-3:] == ["1", "doubling", "beyond"]
    assert rows["8"][-1] == "measured"
    assert lines[-1] == "mine/critical-batch.json"
    content = json.loads((tmp_path / "mine/critical-batch.json").read_text())
    assert content["determined"]
    assert content["critical_batch"]["batch_size"] == pytest.approx(8, rel=0.01)
    assert [row["batch_size"] for row in content["batches"]] == [2, 4, 8, 16]
