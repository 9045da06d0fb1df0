"""`largebatch critical-batch`, as a user runs it."""

import json

import pytest
from PIL import Image

from largebatch.recipes.tune.critical_batch import estimate
from tests.recipes.commands.test_app import command, run
from tests.recipes.tune.critical_batch.law import SMALL, Law


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def critical_batch(photos):
    def invoke(*arguments):
        result = run("critical-batch", "digits", *SMALL, f"data.path={photos}", *arguments)
        return result

    return invoke


def test_an_estimate_prints_a_table_and_writes_a_picture(critical_batch, monkeypatch, folder):
    Law(8).install(monkeypatch)
    result = critical_batch(
        *("--batches", "2,4,8", "--epochs", "30", "--out", "mine"),
        *("--gpus", "1,2", "--gpu", "v100", "--measured", "8:1000"),
    )
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "batch 2, 20 epochs, seed 0: training loss 0.1250, held-out" in result.output
    assert any(line.startswith("critical batch by whole runs: 8 images (90 %:") for line in lines)
    table = [line.split() for line in lines if " (" in line and line.split()[0].isdigit()]
    rows = {row[0]: row for row in table}
    assert list(rows) == ["2", "4", "8", "16", "32"]
    assert rows["16"][-3:] == ["1", "doubling", "beyond"]
    assert "32 is further out" in result.output
    assert any("predicted time to the loss" in line for line in lines)
    assert lines[-2:] == ["mine/critical-batch.json", "mine/critical-batch.png"]
    assert Image.open(folder / "mine/critical-batch.png").size[0] > 1000
    content = json.loads((folder / "mine/critical-batch.json").read_text())
    assert content["methods"]["whole runs"]["determined"]
    assert set(content["hours"]) == {"1", "2"}
    hours, prices = content["hours"]["1"], content["prices"]
    assert hours["8"] == pytest.approx(prices[2]["updates"][0] * 8 / 1000 / 3600)


@pytest.mark.slow("trains several runs")
def test_a_short_estimate_by_the_trainer(critical_batch, monkeypatch):
    """The real trainer, on runs too short to say anything; the same command then repeats none."""
    monkeypatch.setattr(estimate, "FEWEST_UPDATES", 1)
    monkeypatch.setattr(estimate, "_MOST_SEEDS", 1)
    options = ("--batches", "4,8", "--epochs", "2", "--max-epochs", "9", "--json")
    result = critical_batch(*options, "micro_batch_size=2")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["training_images"], found["held_out_images"] == (40, 13)
    assert {run["run"]["batch_size"] for run in found["runs"]} == {4, 8}
    assert all(run["loss"] > 0 and run["status"] == "finished" for run in found["runs"])
    assert len(result.stderr.splitlines()) == len(found["runs"]) >= 4
    again = critical_batch(*options, "micro_batch_size=2")
    assert (json.loads(again.stdout), again.stderr) == (found, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "8,x"], "--batches: '8,x' is not a list of whole numbers above 0; valid: "),
        (["--batches", "4,64"], "--batches: 64 is larger than the data set, 40 training images; "),
        (["--rule", "cubic"], "--rule: unknown: 'cubic'; valid: linear, sqrt"),
        (["--method", "guess"], "--method: unknown: 'guess'; valid: runs, branches, both"),
        (["--gpu", "h100"], "--gpu: predicts nothing by itself; valid: together with"),
        (["--gpus", "8"], "--measured: missing; valid: such as 256:2470 for 2,470 images/s"),
        (["--epochs", "1", "--batches", "4,8"], "--epochs: 1 are too few for a batch of 8, which "),
        (["--max-epochs", "5"], "--epochs: "),
        (["data.holdout=53"], "data.holdout: 53 of 53 training images leaves none to train on"),
        (["--nproc", "3"], "batch_size"),
    ],
)
def test_mistakes_are_answered_in_one_line(critical_batch, options, message):
    result = critical_batch(*options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"largebatch: error: {message}"), result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow("starts two processes that train")
def test_two_processes_share_a_run(photos, folder):
    options = ("--batches", "4,8", "--epochs", "4", "--max-epochs", "5", "--nproc", "2")
    small = [*SMALL, "micro_batch_size=2", f"data.path={photos}"]
    result = command("critical-batch", "digits", *small, *options, "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [run["trained"] for run in found["runs"]] == [2.7]
    assert found["left_out"]
    assert not found["methods"]["whole runs"]["determined"]


@pytest.mark.slow("starts two processes that train")
def test_two_runs_are_made_side_by_side(photos, folder):
    options = ("--batches", "4,8", "--epochs", "4", "--max-epochs", "7", "--workers", "2")
    small = [*SMALL, "precision=fp32", f"data.path={photos}"]
    result = command("critical-batch", "digits", *small, *options, "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    # In the order in which they ended.
    assert sorted(run["run"]["epochs"] for run in found["runs"]) == [2.667, 4.0]
    assert {run["status"] for run in found["runs"]} == {"finished"}
