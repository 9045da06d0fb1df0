"""Settings that won at a neighbouring batch: which are trained, and what is said of them."""

import json

import pytest

from benchmarks.airbench_optimizers import RECIPE
from benchmarks.recipes import epochs_to_target as grid
from benchmarks.recipes import search_rivals
from benchmarks.recipes.search_rivals import rivals_of, table
from largebatch.recipes.schema.load import load

SHORT, LONG = (0.1, 1.0, 0.6), (0.3, 0.7, 0.9)


def trial(shape, lr, epochs=16.0, top1=85.0):
    return {**dict(zip(search_rivals.SHAPE, shape, strict=True)), "lr": lr, "epochs": epochs,
            "top1": top1}  # fmt: skip


def search(batch_size, *trials):
    return {"optimizer": "Muon", "batch_size": batch_size, "best": trials[0], "trials": trials}


SEARCHES = [
    search(256, trial(SHORT, 0.1), trial(LONG, 0.05, epochs=4.0)),
    search(2560, trial((0.104, 1.0, 0.6), 0.3), trial(LONG, 0.2, epochs=1.54, top1=50.0),
           trial(LONG, 0.2, epochs=1.0, top1=51.0)),
    search(4096, trial(LONG, 0.25), trial(SHORT, 0.4)),
    search(8192, trial(LONG, 0.35)),
]  # fmt: skip


def test_a_rival_won_at_a_neighbouring_batch_and_has_the_rate_of_this_one():
    assert rivals_of(SEARCHES, "Muon", 256) == []  # the neighbour's winner is its own
    (rival,) = rivals_of(SEARCHES, "Muon", 2560)
    assert (rival.won_at, rival.lr, rival.tried) == (4096, 0.2, 1.5)
    assert (rival.warmup, rival.power, rival.momentum) == LONG
    (rival,) = rivals_of(SEARCHES, "Muon", 4096)
    assert (rival.won_at, rival.lr) == (2560, 0.4)
    assert rivals_of(SEARCHES, "Muon", 8192) == []
    recipe = load(RECIPE, rival.run(1).overrides).recipe
    assert (recipe.batch_size, recipe.epochs, recipe.seed) == (4096, grid.EPOCHS, 1)
    assert (recipe.optimizer.lr, recipe.schedule.power, recipe.data.holdout) == (0.4, 1.0, None)


def test_a_batch_between_neighbours_has_their_winner_once_at_the_length_asked_for():
    between = search(1024, trial(LONG, 0.15), trial(SHORT, 0.17))
    (rival,) = rivals_of([*SEARCHES, between], "Muon", 1024, 10.24)
    assert (rival.won_at, rival.lr, rival.tried) == (256, 0.17, 16)
    run = rival.run(0)
    assert run.identity["epochs"] == load(RECIPE, run.overrides).recipe.epochs == 10.24
    (other,) = rivals_of([*SEARCHES, between], "Muon", 2560)
    assert other.won_at == 4096  # as before it was searched


def test_rivals_are_trained_and_compared_with_the_setting_of_their_cell(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(grid, "RESULT", tmp_path / "epochs_to_target.json")
    monkeypatch.setattr(search_rivals, "RESULT", tmp_path / "search_rivals.json")
    cells = {("Muon", 2560): 12.8, ("Muon", 4096): 16, ("LARS", 256): 16}  # the last: no search
    monkeypatch.setattr(search_rivals, "CELLS", cells)
    own = [
        {"optimizer": "Muon", "batch_size": batch, "epochs": epochs, "seed": seed, "top1": top1}
        for batch, epochs in ((2560, 12.8), (4096, 16.0))
        for seed, top1 in enumerate((86.0, 86.2, 86.4))
    ]  # fmt: skip
    grid.RESULT.write_text(json.dumps({"searches": SEARCHES, "runs": own}))
    asked = []

    def run_missing(path, claim, runs, data, workers):
        asked.extend(runs)
        rows = [{**run.identity, "top1": 87.0 + 0.2 * run.identity["seed"]} for run in runs]
        return [{**row, "date": "2026-11-25"} for row in rows if row["batch_size"] == 2560]

    monkeypatch.setattr(search_rivals, "run_missing", run_missing)
    monkeypatch.setattr("sys.argv", ["search_rivals", "--data", "nowhere"])
    search_rivals.main()
    assert [(r.identity["batch_size"], r.identity["seed"]) for r in asked] == [
        (2560, 0), (2560, 1), (4096, 0), (4096, 1)
    ]  # fmt: skip
    text = search_rivals.RESULT.with_suffix(".md").read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    start = "| Muon | 2,560 | 12.8 | 4,096 | 1.5 | 0.2 "
    assert f"{start}| 87.10 | 86.20 | +0.90 ± 0.45 | 2 and 3 |" in text
    assert "| Muon | 4,096 | 16 | 2,560 | 16 | 0.4 | not trained" in text


def test_a_rival_that_is_not_told_apart_is_unresolved():
    (rival,) = rivals_of(SEARCHES, "Muon", 2560)
    rows = [{**rival.run(seed).identity, "top1": 86.1 + 0.2 * seed} for seed in range(2)]
    own = [{**rows[0], "epochs": 16.0, "seed": s, "top1": 86.0 + 0.2 * s} for s in range(2)]
    assert "+0.10 ± 0.61, unresolved" in table([rival], rows, own)
    with pytest.raises(ValueError, match="no spread between seeds"):
        table([rival], rows[:1], own[:1])
