"""Scripts of benchmarks/recipes that measure run at a small size."""

import json

import pytest
import typer.main

from benchmarks.recipes import checkpoint_cost, critical_batch, tune_lr
from largebatch.recipes.commands.tree import app
from tests.recipes.tune.critical_batch.law import SMALL, Law


def test_the_share_of_a_checkpoint_in_the_training_time(cells_of):
    text = checkpoint_cost.report(
        {**dict.fromkeys(checkpoint_cost.WAYS, [1.0] * 3), "ours": [3.0, 2.0, 1.0]}
    )
    # 8 epochs take 4,100 s at 2,500 images per second, and 68 s at 150,000.
    assert cells_of(text)[5:] == [["2,500", "0.05%", "met"], ["150,000", "2.93%", "missed"]]


def test_critical_batch(run_script, photos, tmp_path, monkeypatch, capsys):
    """On runs that obey a law, which a batch of 32 breaks."""
    Law(8, lambda batch, seed, epochs: 1.5 if batch > 16 else 1.0).install(monkeypatch)
    result = tmp_path / "result.json"
    options = ["--data", photos, "--out", tmp_path / "runs", "--result", result, "--seeds", 2]
    options += ["--batches", 2, 4, 8, "--epochs", 30, "--set", *SMALL]
    run_script(critical_batch, *options)
    assert capsys.readouterr().out.endswith(": no\n")
    one = json.loads(result.read_text())["digits"]
    ratios = {row["batch_size"]: row["predicted_over_measured"] for row in one["rows"]}
    assert ratios == pytest.approx({16: 1, 32: 1 / 1.5}, abs=0.04)
    assert critical_batch.compared(one) == one["rows"]  # from the stored runs alone
    one["checks"][-1][3] = None
    assert "predicted_over_measured" not in critical_batch.compared(one)[-1]  # which diverged


def test_the_options_of_tune_lr_are_those_of_the_command():
    command = typer.main.get_command(app).commands["tune"].commands["lr"]
    known = {option for parameter in command.params for option in parameter.opts}
    given = {a for case in tune_lr.CASES.values() for a in case.budget if a.startswith("--")}
    assert given | {"--nproc", "--out"} <= known
