"""Other learning rates of biases at 8,192: what is trained, and what is said of it."""

import json

import pytest

from benchmarks.airbench_optimizers import RECIPE
from benchmarks.recipes import bias_rate
from benchmarks.recipes import epochs_to_target as grid
from benchmarks.recipes.bias_rate import SETTINGS, best_of
from largebatch.recipes.schema.load import load


@pytest.mark.parametrize("setting", SETTINGS)
def test_only_the_rate_of_biases_differs_from_the_grid(setting):
    tuned = {key: getattr(setting, key) for key in ("lr", "warmup", "power", "momentum")}
    run = grid.Run(setting.optimizer, 8192, 16.0, 1)
    of_grid = load(RECIPE, run.overrides(tuned)).recipe
    here = load(RECIPE, setting.run(1).overrides).recipe
    assert of_grid.optimizer.bias_lr_scale == bias_rate.GRID_SCALE
    assert here.optimizer.bias_lr_scale == setting.bias_lr_scale < bias_rate.GRID_SCALE
    same = here.optimizer.model_copy(update={"bias_lr_scale": 64.0})
    assert here.model_copy(update={"optimizer": same}) == of_grid
    assert load(RECIPE, setting.run(0, 5000).overrides).recipe.data.holdout == 5000


def test_the_best_on_held_out_images_is_compared_on_the_test_set(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grid, "RESULT", tmp_path / "epochs_to_target.json")
    monkeypatch.setattr(bias_rate, "RESULT", tmp_path / "bias_rate.json")
    own = [
        {"optimizer": optimizer, "batch_size": 8192, "epochs": 16.0, "seed": seed,
         "top1": top1 + 0.2 * seed}
        for optimizer, top1 in (("Nesterov", 72.0), ("LARS", 82.0), ("Muon", 85.0))
        for seed in range(2)
    ]  # fmt: skip
    best = {"lr": 0.5214, "warmup": 0.321, "power": 1.62, "momentum": 0.944, "top1": 71.5}
    searches = [{"optimizer": o, "batch_size": 8192, "best": best} for o in ("Nesterov", "Muon")]
    grid.RESULT.write_text(json.dumps({"searches": searches, "runs": own}))
    rows = []

    def run_missing(path, claim, runs, data, workers):
        for run in runs:
            held_out, lr = run.identity["held_out"], run.identity["lr"]
            top1 = (80.0 - lr if held_out else 81.0) + 0.2 * run.identity["seed"]
            rows.append({**run.identity, "top1": top1, "date": "2026-11-25"})
        return rows

    monkeypatch.setattr(bias_rate, "run_missing", run_missing)
    monkeypatch.setattr("sys.argv", ["bias_rate", "--data", "nowhere"])
    bias_rate.main()
    assert best_of(rows, "Nesterov") == SETTINGS[0]
    final = [(row["optimizer"], row["seed"]) for row in rows if not row["held_out"]]
    assert final == [("Nesterov", 0), ("Nesterov", 1), ("Muon", 0), ("Muon", 1)]
    text = bias_rate.RESULT.with_suffix(".md").read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    sgd = "| SGD, Nesterov momentum |"
    assert f"{sgd} 64 | 0.521 | 0.321 | 1.62 | 0.944 | 71.50 |" in text
    assert f"{sgd} 1 | 0.521 | 0.32 | 1.62 | 0.944 | 79.48 |" in text
    of_grid = "SGD, Nesterov momentum of the grid, 72.10"
    assert f"{sgd} 1 | 81.10 ± 0.26 | {of_grid} | +9.00 ± 0.36 | 2 and 2 |" in text
    assert f"{sgd} 1 | 81.10 ± 0.26 | LARS of the grid, 82.10 | -1.00 ± 0.36 | 2 and 2 |" in text
    assert "| Muon | 8 | 81.10 ± 0.26 | Muon of the grid, 85.10 | -4.00 ± 0.36 | 2 and 2 |" in text
