"""SGD with its biases at the rate of the other weights: what is trained, and what is said of it."""

import json

from benchmarks.airbench_optimizers import RECIPE
from benchmarks.recipes import epochs_to_target as grid
from benchmarks.recipes import sgd_bias_rate
from benchmarks.recipes.sgd_bias_rate import SETTINGS, best_of
from largebatch.recipes.schema.load import load


def test_only_the_rate_of_biases_differs_from_the_grid():
    setting = SETTINGS[0]
    tuned = {"lr": 0.521, "warmup": 0.32, "power": 1.62, "momentum": 0.944}
    of_grid = load(RECIPE, grid.Run("Nesterov", 8192, 16.0, 1).overrides(tuned)).recipe
    here = load(RECIPE, setting.run(1).overrides).recipe
    assert of_grid.optimizer.bias_lr_scale == 64
    assert here.optimizer.bias_lr_scale == 1
    same = here.optimizer.model_copy(update={"bias_lr_scale": 64.0})
    assert here.model_copy(update={"optimizer": same}) == of_grid
    assert load(RECIPE, setting.run(0, 5000).overrides).recipe.data.holdout == 5000


def test_the_best_on_held_out_images_is_compared_on_the_test_set(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grid, "RESULT", tmp_path / "epochs_to_target.json")
    monkeypatch.setattr(sgd_bias_rate, "RESULT", tmp_path / "sgd_bias_rate.json")
    own = [
        {"optimizer": optimizer, "batch_size": 8192, "epochs": 16.0, "seed": seed,
         "top1": top1 + 0.2 * seed}
        for optimizer, top1 in (("Nesterov", 72.0), ("LARS", 82.0)) for seed in range(2)
    ]  # fmt: skip
    grid.RESULT.write_text(json.dumps({"searches": [], "runs": own}))
    rows = []

    def run_missing(path, claim, runs, data, workers):
        for run in runs:
            held_out, lr = run.identity["held_out"], run.identity["lr"]
            top1 = (80.0 - lr if held_out else 81.0) + 0.2 * run.identity["seed"]
            rows.append({**run.identity, "top1": top1, "date": "2026-11-25"})
        return rows

    monkeypatch.setattr(sgd_bias_rate, "run_missing", run_missing)
    monkeypatch.setattr("sys.argv", ["sgd_bias_rate", "--data", "nowhere"])
    sgd_bias_rate.main()
    assert best_of(rows) == SETTINGS[0]
    assert [(row["held_out"], row["seed"]) for row in rows] == [*[(5000, 0)] * 5, (0, 0), (0, 1)]
    text = sgd_bias_rate.RESULT.with_suffix(".md").read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    assert "| 0.521 | 0.32 | 1.62 | 0.944 | 79.48 |" in text
    assert "| SGD, biases at 64 times the rate | 72.10 ± 0.32 | +9.00 ± 0.45 | 2 |" in text
    assert "| LARS | 82.10 ± 0.32 | -1.00 ± 0.45 | 2 |" in text
