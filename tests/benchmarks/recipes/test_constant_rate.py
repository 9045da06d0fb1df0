"""A constant rate with averaged weights: the runs that are made, and what the report says."""

import json
import math

import pytest
from scipy.stats import ttest_1samp

from benchmarks.recipes import constant_rate
from benchmarks.recipes import epochs_to_target as grid
from benchmarks.recipes.crossing import Crossing
from benchmarks.recipes.epochs_to_target_estimates import TARGET_CELL
from largebatch.recipes.schema.load import load

BEST = {"lr": 0.8, "warmup": 0.2, "power": 1.0, "momentum": 0.85, "top1": 85.0}
LENGTHS = (12.8, 16.0, 20.0)


def top1(epochs, seed, times=1.0):
    return round(86 + 3 * math.log(epochs / 16 / times) + 0.03 * (seed - 1), 2)


def rows(times):
    """Trials of which a quarter of the peak is best, and final runs that take ``times`` as long."""
    trials = [
        {"final": False, "lr": 0.8 * part, "top1": 80.0, "average": [[16.0, 85 - abs(part - 0.25)]]}
        for part in constant_rate.FRACTIONS
    ]
    lengths = (3.2, 6.4, 9.6, 12.8, 16.0, 19.2, 20.0)
    final = [
        {"final": True, "lr": 0.2, "seed": seed, "top1": 80.0,
         "average": [[epochs, top1(epochs, seed, times)] for epochs in lengths]}
        for seed in range(3)
    ]  # fmt: skip
    return [*trials, *final]


SCHEDULED = [{"epochs": e, "seed": s, "top1": top1(e, s)} for e in LENGTHS for s in range(3)]


@pytest.mark.parametrize(
    ("times", "goal"),
    [
        (1.0, "Goal, within 10 %: met."),
        (1.08, "Goal, within 10 %: undecided."),
        (1.2, "Goal, within 10 %: missed."),
    ],
)
def test_the_epochs_of_both_ways_are_compared(times, goal):
    found = constant_rate.compare(rows(times), SCHEDULED, 86.0)
    own, constant, ratio = found
    assert own.epochs == pytest.approx(16, rel=0.01)
    assert constant.epochs == pytest.approx(16 * times, rel=0.01)
    assert ratio.low < times < ratio.high
    assert constant_rate.verdict(*found, 86.0).strip().endswith(goal)


def test_a_constant_rate_that_never_arrives_is_said_to_be_beyond_what_was_trained():
    text = constant_rate.verdict(*constant_rate.compare(rows(1.5), SCHEDULED, 86.0), 86.0)
    assert "? at a constant rate" in text
    assert text.strip().endswith("Goal, within 10 %: undecided.")


def test_the_interval_of_a_constant_rate_is_that_of_its_runs_and_not_of_its_points():
    """Runs that differ in epochs to the target, each without noise: every point repeats it."""
    final = [
        {"final": True, "average": [[e, 86 + 3 * math.log(e / at)] for e in (12.8, 16.0, 20.0)]}
        for at in (15.0, 16.0, 17.0)
    ]
    _, constant, _ = constant_rate.compare(final, SCHEDULED, 86.0)
    logarithms = [math.log(at) for at in (15.0, 16.0, 17.0)]
    low, high = ttest_1samp(logarithms, 0).confidence_interval(0.95)
    assert (constant.low, constant.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-3)
    assert constant_rate.geometric_mean([15.0, 0.0], 12.8, 20.0) == Crossing(0, 0, math.inf)


@pytest.mark.parametrize("final", [False, True])
def test_runs_have_a_constant_rate_and_an_average_and_trials_hold_images_out(final):
    run = constant_rate.run(BEST, 0.25, epochs=16, seed=1, final=final)
    recipe = load(run.recipe, run.overrides).recipe
    assert (recipe.schedule.name, recipe.optimizer.lr, recipe.seed) == ("constant", 0.2, 1)
    assert recipe.ema.decay is not None
    assert recipe.batch_size == TARGET_CELL[1]
    assert recipe.data.holdout == (None if final else 5000)


def test_the_rate_is_chosen_by_the_average_and_the_final_runs_take_it(
    tmp_path, monkeypatch, capsys
):
    path = tmp_path / "constant_rate.json"
    monkeypatch.setattr(constant_rate, "RESULT", path)
    monkeypatch.setattr(grid, "RESULT", tmp_path / "epochs_to_target.json")
    cell = {"optimizer": TARGET_CELL[0], "batch_size": TARGET_CELL[1]}
    runs = [{**cell, **row} for row in SCHEDULED]
    grid.RESULT.write_text(json.dumps({"searches": [{**cell, "best": BEST}], "runs": runs}))
    asked = []

    def run_missing(to, claim, wanted, data, workers, more):
        asked.append(wanted)
        metrics = [
            {"split": "train", "epoch": 3.2},
            {"split": "val", "epoch": 3.2, "ema_top1": 50.004},
        ]
        assert more(metrics) == {"average": [[3.2, 50.0]]}
        made = rows(1.0)[: 5 if len(asked) == 1 else None]  # also those of the call before
        return [{**row, "date": "2026-11-24"} for row in made]

    monkeypatch.setattr(constant_rate, "run_missing", run_missing)
    monkeypatch.setattr("sys.argv", ["constant_rate", "--data", "nowhere"])
    constant_rate.main()
    assert [run.identity["lr"] for run in asked[0]] == [0.8, 0.4, 0.2, 0.1, 0.05]
    assert [run.identity for run in asked[1]] == [
        {"final": True, "lr": 0.2, "epochs": 20, "seed": seed} for seed in constant_rate.SEEDS
    ]
    text = path.with_suffix(".md").read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    assert "| 0.2 | 85.00 | 80.00 |" in text
    assert "| 12.8 | 85.33 ± 0.03 | 3 | 85.33 ± 0.03 | 3 |" in text
    assert "| 19.2 |  |  | 86.55 ± 0.03 | 3 |" in text
    assert path.with_suffix(".png").stat().st_size > 5000


def test_without_the_cell_nothing_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "RESULT", tmp_path / "epochs_to_target.json")
    monkeypatch.setattr("sys.argv", ["constant_rate", "--data", "nowhere"])
    with pytest.raises(SystemExit, match=r"lacks the cell; valid: after epochs_to_target\.py"):
        constant_rate.main()
