"""The price of a batch: which runs are made, and what the report says of them."""

import json
import math

import pytest

from benchmarks.recipes import batch_price, large_batch
from benchmarks.recipes.batch_price_report import larger, summary, table, target_of, write
from benchmarks.recipes.large_batch_report import finals
from largebatch.recipes.schema.load import load

GRID = large_batch.Runs(large_batch.RESULTS).rows


def rows(prices):
    """The runs, with accuracies that meet the target at given multiples of 20 epochs."""
    target = [r["top1"] for r in finals(GRID, "lars", 256)]
    mean, found = sum(target) / len(target), []
    for run in batch_price.runs():
        batch, epochs = run.identity["batch_size"], run.identity["epochs"]
        behind = 3 * math.log(epochs / 20 / prices[batch]) if batch in prices else 0
        spread = 0.2 * (run.identity["seed"] % 3 - 1)
        row = {"top1": round(mean + behind + spread, 3), "date": "2026-11-23"}
        found.append({**run.identity, **row})
    return found


def test_runs_are_those_that_the_grid_lacks_with_its_tuned_values():
    wanted = batch_price.runs()
    cells = [(r.identity["batch_size"], r.identity["epochs"], r.identity["seed"]) for r in wanted]
    assert len(set(cells)) == len(cells) == 3 * 2 * 3 + 5
    assert {c for c in cells if c[0] == 256} == {(256, 20, seed) for seed in range(3, 8)}
    tuned = {b: finals(GRID, "lars", b)[0] for b in (256, 2560, 4096)}
    for (batch, epochs, seed), run in zip(cells, wanted, strict=True):
        recipe = load(large_batch.RECIPES["lars"], [*run.overrides]).recipe
        assert (recipe.batch_size, recipe.epochs, recipe.seed) == (batch, epochs, seed)
        assert recipe.optimizer.lr == tuned[batch]["lr"]
        assert str(recipe.schedule.warmup) == f"{tuned[batch]['warmup_epochs']}ep"
        assert recipe.data.holdout is None


def test_the_price_is_where_the_runs_meet_the_small_batch():
    found = rows({2560: 1.3, 4096: 1.7})
    assert larger(found) == [2560, 4096]
    target = target_of(found, GRID)
    assert target.freedom == 7  # eight seeds
    one, other = summary(found, GRID)
    assert one.startswith("- **2,560** (19.5 updates per epoch): 1.")
    prices = [float(line.split("epoch): ")[1].split()[0]) for line in (one, other)]
    assert prices == pytest.approx([1.3, 1.7], rel=0.05)
    assert "Goal, at most 1.6 times: met." in one
    assert "Goal" not in other


def test_a_goal_that_the_interval_holds_is_undecided():
    (one, _) = summary(rows({2560: 1.58, 4096: 1.7}), GRID)
    assert "Goal, at most 1.6 times: undecided." in one
    (one, _) = summary(rows({2560: 1.95, 4096: 1.7}), GRID)
    assert "missed" in one


def test_differences_whose_interval_holds_zero_are_unresolved():
    lines = table(rows({2560: 1.3, 4096: 1.7}), GRID).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines[2:] if line.startswith("|")]
    by_cell = {(cell[0], cell[2]): cell[-1] for cell in cells}
    assert by_cell["4,096", "20"] == "below"
    assert by_cell["2,560", "26"] == "unresolved"
    assert by_cell["2,560", "40"] == "above"


def test_the_report_is_written_beside_the_results(tmp_path):
    path = tmp_path / "batch_price.json"
    content = {
        "machine": {"processor": "P", "cores": 2},
        "versions": {"torch": "2"},
        "runs": rows({2560: 1.3, 4096: 1.7}),
    }
    path.write_text(json.dumps(content))
    text = write(path, GRID)
    assert path.with_suffix(".md").read_text() == text
    assert "23 runs, 2026-11-23, P, 2 cores, torch 2" in text
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
