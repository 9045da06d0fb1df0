"""What the grid does not tune: what is trained, and what is said of it."""

import json

import pytest

from benchmarks.airbench_optimizers import RECIPE
from benchmarks.recipes import epochs_to_target as grid
from benchmarks.recipes import untuned
from benchmarks.recipes.untuned import CHANGES
from largebatch.recipes.schema.load import load

BEST = {"lr": 0.5, "warmup": 0.1, "power": 1.5, "momentum": 0.9, "top1": 86.0}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_alone_differs_from_the_setting_of_its_cell(change):
    run = grid.Run(change.optimizer, change.batch_size, grid.EPOCHS, 1)
    of_grid = load(RECIPE, run.overrides(BEST)).recipe
    here = load(RECIPE, change.run(BEST, 1).overrides).recipe
    key, _, value = change.override.removeprefix("optimizer.").partition("=")
    before, after = getattr(of_grid.optimizer, key), getattr(here.optimizer, key)
    given = {"nesterov": [False], "bias_lr_scale": [64.0], "weight_decay": [5e-4, 1.3e-3]}
    assert before in given[key]
    assert after != before
    assert after == (value == "true" if key == "nesterov" else float(value))
    same = here.optimizer.model_copy(update={key: before})
    assert here.model_copy(update={"optimizer": same}) == of_grid


def test_each_change_is_compared_with_its_cell_and_other_optimizers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grid, "RESULT", tmp_path / "epochs_to_target.json")
    monkeypatch.setattr(untuned, "RESULT", tmp_path / "untuned.json")
    means = {"Nesterov-1x": (85.9, 85.6, 81.0), "LARS": (86.0, 86.0, 82.0),
             "Muon": (87.0, 87.0, 86.0)}  # fmt: skip
    cells = {
        (optimizer, batch_size): top1
        for optimizer, row in means.items()
        for batch_size, top1 in zip((256, 2560, 8192), row, strict=True)
    }
    own = [
        {"optimizer": optimizer, "batch_size": batch_size, "epochs": 16.0, "seed": seed,
         "top1": top1 + 0.2 * seed}
        for (optimizer, batch_size), top1 in cells.items()
        for seed in range(3)
    ]  # fmt: skip
    searches = [{"optimizer": o, "batch_size": b, "best": BEST} for o, b in cells]
    grid.RESULT.write_text(json.dumps({"searches": searches, "runs": own}))

    def run_missing(path, claim, runs, data, workers):
        first = {256: 86.7, 2560: 86.2, 8192: 85.7}
        return [
            {**run.identity, "date": "2026-11-25",
             "top1": first[run.identity["batch_size"]] + 0.2 * run.identity["seed"]}
            for run in runs
        ]  # fmt: skip

    monkeypatch.setattr(untuned, "run_missing", run_missing)
    monkeypatch.setattr("sys.argv", ["untuned", "--data", "nowhere"])
    untuned.main()
    text = untuned.RESULT.with_suffix(".md").read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    # The spread: sqrt((9 cells x 2 x 0.2^2 + 6 changes x 0.02) / 24) = 0.187; t is 2.064.
    nesterov, seeds = "`optimizer.nesterov=true` |", "2, 3, 3, 3, 3"
    start = f"| LARS | 256 | {nesterov} 86.80 ± 0.27 | +0.60 ± 0.35"
    assert f"{start} | -0.70 ± 0.35 |  | +0.40 ± 0.35 | {seeds} |" in text
    start = f"| LARS | 2,560 | {nesterov} 86.30 ± 0.27 | +0.10 ± 0.35, unresolved"
    assert f"{start} | -0.50 ± 0.35 |  | +0.90 ± 0.35 | {seeds} |" in text
    start = "| SGD | 2,560 | `optimizer.weight_decay=5e-4` | 86.30 ± 0.27 | +0.50 ± 0.35"
    assert f"{start} |  | -0.10 ± 0.35, unresolved | +0.90 ± 0.35 | {seeds} |" in text
    start = "| Muon | 8,192 | `optimizer.bias_lr_scale=8` | 85.80 ± 0.27 | -0.40 ± 0.35"
    assert f"{start} | -4.60 ± 0.35 | -3.60 ± 0.35 |  | {seeds} |" in text
