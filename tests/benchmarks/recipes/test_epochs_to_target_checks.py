"""What is said of prices: goals, other targets and readings, and what is drawn."""

import math

import pytest
from matplotlib.axes import Axes

from benchmarks.recipes.crossing import Crossing
from benchmarks.recipes.epochs_to_target_checks import (
    LUCK,
    OTHER_TARGETS,
    lengths_table,
    losses_at,
    luck_table,
    readings_table,
    targets_table,
)
from benchmarks.recipes.epochs_to_target_estimates import SMALL, crossings, price_of
from benchmarks.recipes.epochs_to_target_goals import GAINS, goals_table, verdict
from benchmarks.recipes.epochs_to_target_plot import draw

#: Points of accuracy that the simulated runs gain when the epochs grow by a factor of e.
SLOPE = 2.0


def runs(optimizer, batch_size, at, lengths=(0.5, 1.0, 2.0, 4.0), loss_at=None, bend=0.0):
    """Runs that reach 86 % in a number of epochs, and a training loss of 1 in another."""

    def row(epochs, seed):
        beyond, of_loss = math.log(epochs / at), math.log(epochs / (loss_at or at))
        return {
            "optimizer": optimizer, "batch_size": batch_size, "epochs": epochs, "seed": seed,
            "top1": 86 + SLOPE * beyond + bend * beyond**2 + 0.05 * seed,
            "train_loss": 1 - 0.1 * of_loss + 0.001 * seed,
        }  # fmt: skip

    return [row(length * at, seed) for length in lengths for seed in (-1, 0, 1)]


@pytest.mark.parametrize(
    ("price", "said"),
    [
        (Crossing(1.2, 1.1, 1.3), "met"),
        (Crossing(1.7, 1.65, 1.8), "missed"),
        (Crossing(1.5, 1.4, 1.7), "undecided"),
        (Crossing(1.7, 1.5, 1.8), "undecided"),
        (Crossing(math.inf, 1.7, math.inf), "missed"),
        (Crossing(math.inf, 1.5, math.inf), "undecided"),
        (Crossing(0, 0, 1.5), "met"),
    ],
)
def test_a_goal_that_the_interval_holds_is_undecided(price, said):
    assert verdict(price, 1.6) == said


def least_gain(distance):
    """The first of GAINS that moves an end of a price's interval by that distance of logarithms."""
    return next(gain for gain in GAINS if gain / SLOPE > distance)


def test_the_least_gain_that_changes_a_verdict_is_at_the_batch_where_it_would():
    rows = runs("LARS", 256, 10.0) + runs("LARS", 2560, 14.0)
    rows += runs("Muon", 256, 8.0) + runs("Muon", 2560, 11.0) + runs("Muon", 4096, 30.0)
    found = crossings(rows, 86.0)
    lars, muon = price_of(found, "LARS", 2560, "LARS"), price_of(found, "Muon", 2560, "Muon")
    *_, of_lars, of_muon, beyond = goals_table(rows, 86.0).splitlines()
    gain = least_gain(math.log(1.6 / lars.high))
    assert "LARS at 2,560: at most 1.6 times | **met**: 1.40 (1.3" in of_lars
    assert of_lars.endswith(f"| {gain:.2f} points at 256 |")
    gain = least_gain(math.log(muon.low / 1.0))
    assert "the best at 2,560 (Muon), over the best at 256 (Muon)" in of_muon
    assert "**missed**: 1.3" in of_muon
    assert of_muon.endswith(f"| {gain:.2f} points at 2,560 |")
    assert beyond.endswith("| more than 1.0 points at 4,096 |")


def test_an_undecided_goal_names_no_gain():
    rows = runs("LARS", 256, 10.0) + runs("LARS", 2560, 16.0)
    assert goals_table(rows, 86.0).splitlines()[-1].endswith(") |  |")


def test_a_price_that_does_not_depend_on_the_target_is_the_same_for_all():
    rows = runs("LARS", 256, 10.0) + runs("LARS", 2560, 15.0) + runs("Nesterov", 2560, 15.0)
    *_, line = targets_table(rows, 86.0).splitlines()
    start, *prices = line.strip("| ").split(" | ")[1:]
    assert (start, len(prices)) == ("LARS", len(OTHER_TARGETS))
    assert all(price.startswith("1.50 (1.4") for price in prices)


def test_a_better_setting_lowers_the_price_at_the_larger_batch_and_raises_it_at_the_small_one():
    rows = runs("LARS", 256, 10.0) + runs("LARS", 2560, 15.0)
    *_, line = luck_table(rows, 86.0).splitlines()
    found = [float(price.split()[0]) for price in line.strip("| ").split(" | ")[2:]]
    factor = math.exp(LUCK / SLOPE)
    assert found == pytest.approx([1.5, 1.5 / factor, 1.5 * factor], abs=0.006)


def test_a_price_is_read_by_curve_and_by_training_loss():
    bent = {"bend": -0.4}
    rows = runs("Muon", 256, 10.0, loss_at=10.0, **bent)
    rows += runs("Muon", 2560, 15.0, loss_at=12.0, **bent)
    rows += runs("Muon", 8192, 20.0, lengths=(0.5, 1.2), loss_at=20.0)
    assert losses_at(rows, 86.0) == {"Muon": 1.0}
    text = readings_table(rows, 86.0)
    assert "(1.00 for Muon)" in text
    *_, at_2560, at_8192 = (line.split(" | ")[2:] for line in text.splitlines())
    assert [price[:6] for price in at_2560] == ["1.50 (", "1.50 (", "1.20 ("]
    # With the bend of the others, what joins two lengths is above the line between them.
    assert [price[:4] for price in at_8192] == ["2.00", "1.94", "2.00"]


def test_a_difference_over_several_lengths_has_the_weight_of_their_seeds():
    def some(optimizer, epochs, *top1):
        return [
            {"optimizer": optimizer, "batch_size": 256, "epochs": epochs, "seed": seed, "top1": one}
            for seed, one in enumerate(top1)
        ]

    rows = some("LARS", 8.0, 85.0, 85.2) + some("Nesterov-1x", 8.0, 85.0, 85.2)
    rows += some("LARS", 16.0, 87.0) + some("Nesterov-1x", 16.0, 86.4)
    rows += some("LARS", 32.0, 99.0) + some("Muon", 64.0, 88.0)  # lengths that one has
    *_, line = lengths_table(rows).splitlines()
    # Variances of the two differences 0 and 0.6: s²(1/2 + 1/2) and s²(1 + 1), thus 2/3 and 1/3.
    mean, variance = 0.6 / 3, 0.02 * (1 / (1 / 1 + 1 / 2))
    half = 4.303 * math.sqrt(variance)
    assert line == f"| 256 | +{mean:.2f} ± {half:.2f}, unresolved (2) |  |  |"


def test_the_plot_joins_neighbours_with_an_estimate_and_marks_the_others(tmp_path, monkeypatch):
    drawn, plot = [], Axes.plot

    def record(self, *points, **options):
        if len(points[0]) and options.get("label") is None:
            drawn.append((self, points, options))
        return plot(self, *points, **options)

    monkeypatch.setattr(Axes, "plot", record)
    noisy = [
        {"optimizer": "Muon", "batch_size": 2048, "epochs": epochs, "seed": seed, "top1": top1}
        for epochs, values in {16.0: (84.0, 87.5), 32.0: (84.5, 88.0)}.items()
        for seed, top1 in enumerate(values)
    ]
    rows = runs("Muon", SMALL, 10.0) + runs("Muon", 512, 10.0) + noisy + runs("Muon", 4096, 20.0)
    rows += runs("Muon", 1024, 10.0, lengths=(1.5, 2.0))  # reached by the shortest
    rows += runs("Muon", 8192, 40.0, lengths=(0.4, 0.5))  # not reached by the longest
    draw(rows + runs("Nesterov", SMALL, 10.0), 86.0, tmp_path / "plot.png")
    epochs = [(points, options) for axes, points, options in drawn if axes is drawn[0][0]]
    near = pytest.approx

    def marked(marker, hollow):
        return [
            (points[0][0], points[1][0])
            for points, options in epochs
            if options.get("marker") == marker and ("markerfacecolor" in options) == hollow
        ]

    estimates = [near((256, 10), rel=0.1), near((512, 10), rel=0.1), near((4096, 20), rel=0.1)]
    assert sorted(marked("o", hollow=False)) == estimates  # open at both ends: not drawn
    assert marked("v", hollow=True) == [near((1024, 15), rel=0.1)]
    assert marked("^", hollow=True) == [near((8192, 20), rel=0.1)]
    lines = [points[0] for points, _ in epochs if len(points[0]) == 2 and len({*points[0]}) == 2]
    assert lines == [near([256, 512], rel=0.1)]  # 512 and 4096 are no neighbours
    updates = [
        points[1][0] for axes, points, options in drawn
        if axes is not drawn[0][0] and options.get("marker") == "o"
    ]  # fmt: skip
    assert sorted(updates) == near([20 * 50_000 / 4096, 10 * 50_000 / 512, 10 * 50_000 / 256], 0.1)
