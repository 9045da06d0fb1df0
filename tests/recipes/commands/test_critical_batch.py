"""`largebatch critical-batch`, as a user runs it."""

import json

import pytest

from largebatch.recipes.tune.critical_batch import estimate
from tests.recipes.commands.test_app import run
from tests.recipes.tune.critical_batch.law import SMALL, Law


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def critical_batch(photos):
    def invoke(*arguments):
        return run("critical-batch", "digits", *SMALL, f"data.path={photos}", *arguments)

    return invoke


def test_an_estimate_prints_a_table_and_writes_its_numbers(critical_batch, monkeypatch, folder):
    Law(8).install(monkeypatch)
    result = critical_batch("--batches", "2,4,8", "--epochs", "30", "--out", "mine")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "batch 2, 20 epochs, seed 0: training loss 0.1250, held-out" in result.output
    assert any(line.startswith("critical batch: 8 images (90 %:") for line in lines)
    rows = {line.split()[0]: line.split() for line in lines if line[:6].strip().isdigit()}
    assert list(rows) == ["2", "4", "8", "16"]
    assert rows["16"][-3:] == ["1", "doubling", "beyond"]
    assert rows["8"][-1] == "measured"
    assert lines[-1] == "mine/critical-batch.json"
    content = json.loads((folder / "mine/critical-batch.json").read_text())
    assert content["determined"]
    assert content["critical_batch"]["batch_size"] == pytest.approx(8, rel=0.01)
    assert [row["batch_size"] for row in content["batches"]] == [2, 4, 8, 16]


@pytest.mark.slow("trains several runs")
def test_a_short_estimate_by_the_trainer(critical_batch, monkeypatch, folder):
    """The real trainer, on runs too short to say anything; the same command then repeats none."""
    monkeypatch.setattr(estimate, "FEWEST_UPDATES", 1)
    monkeypatch.setattr(estimate, "_MOST_SEEDS", 0)
    options = ("--batches", "4,8", "--epochs", "1", "micro_batch_size=2")
    result = critical_batch(*options)
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "critical-batch/digits/critical-batch.json").read_text())
    assert (found["training_images"], found["held_out_images"]) == (40, 13)
    assert [run["run"]["batch_size"] for run in found["runs"]] == [4, 4, 8, 4]
    assert all(run["loss"] > 0 and run["status"] == "finished" for run in found["runs"])
    assert len(result.stderr.splitlines()) == 4
    assert sorted(path.name for path in folder.glob("critical-batch/digits/batch-8*/*")) == [
        *("ending.json", "metrics.jsonl", "recipe.yaml")
    ]
    again = critical_batch(*options)
    assert (again.stdout, again.stderr) == (result.stdout, "")
