"""The arithmetic behind published intervals and verdicts, against its definitions."""

import math
import statistics

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import ttest_ind

from benchmarks.recipes import tune_lr
from benchmarks.recipes.crossing import Crossing, Target, crossing, ratio
from benchmarks.recipes.epochs_to_target_estimates import crossings
from benchmarks.recipes.spread import Spread, Spreads, half_of

LENGTHS = (20, 26, 32, 40)


def curve(epochs):
    x = math.log(epochs / 20)
    return 78.2 + 3.2 * x - 0.8 * x**2


def test_without_noise_a_crossing_is_where_the_curve_meets_the_target():
    epochs = [e for e in LENGTHS for _ in range(3)]
    for top1 in (78.3, 79.2, 79.9):
        found = crossing(epochs, [curve(e) for e in epochs], Target(top1))
        exact = brentq(lambda e, top1=top1: curve(e) - top1, 20, 40)
        assert (found.epochs, found.low, found.high) == pytest.approx((exact,) * 3, rel=1e-3)


def test_what_was_not_trained_is_not_told():
    epochs = [e for e in LENGTHS for _ in range(3)]
    top1 = [curve(e) + d for e, d in zip(epochs, [-0.2, 0, 0.2] * 4, strict=True)]
    assert crossing(epochs, top1, Target(85)) == Crossing(math.inf, 40, math.inf)
    assert crossing(epochs, top1, Target(70)) == Crossing(0, 0, 20)
    small = Crossing(10, 9, 11)
    assert ratio(Crossing(20, 18, math.inf), small).high == math.inf
    assert ratio(Crossing(math.inf, 18, math.inf), small) == Crossing(math.inf, 18 / 11, math.inf)


def runs(optimizer, batch_size, at, lengths, noise, misfit, bend=-0.8, seeds=3):
    """Runs that reach 86 % in a number of epochs, around which their lengths are."""

    def top1(beyond):
        return 86 + 2 * beyond + bend * beyond**2 + misfit()

    return [
        {"optimizer": optimizer, "batch_size": batch_size, "epochs": length * at, "seed": seed,
         "top1": mean + noise()}
        for length in lengths for mean in [top1(math.log(length))] for seed in range(seeds)
    ]  # fmt: skip


def test_intervals_of_a_grid_hold_the_truth_as_often_as_they_say():
    """The cells share a spread, a bend and distances of lengths from it; 95 % are expected."""
    cells = {("LARS", 256): 16.0, ("LARS", 2560): 24.0, ("Muon", 256): 14.0, ("Muon", 8192): 20.0}
    generator, hits = np.random.default_rng(0), []
    for _ in range(60):
        rows = []
        for cell, at in cells.items():
            lengths = (0.8, 1.25) if cell[1] == 8192 else (0.64, 0.8, 1.0, 1.25, 1.56)
            spreads = [lambda d=d: generator.normal(0, d) for d in (0.15, 0.2)]
            rows += runs(*cell, at, lengths, *spreads)
        found = crossings(rows, 86.0)
        hits += [found[cell].low <= at <= found[cell].high for cell, at in cells.items()]
    assert 0.91 <= statistics.mean(hits) < 0.99


def test_intervals_of_differences_are_those_of_t_tests():
    one, other = [86.1, 86.4, 85.9], [85.2, 85.6]
    distance = statistics.mean(one) - statistics.mean(other)
    pooled, of_one, of_other = Spread.of([one, other]), Spread.of([one]), Spread.of([other])
    for spreads, equal in (((pooled, pooled), True), ((of_one, of_other), False)):
        expected = ttest_ind(one, other, equal_var=equal).confidence_interval(0.95)
        half = half_of(list(zip(spreads, (3, 2), strict=True)))
        assert (distance - half, distance + half) == pytest.approx(expected)


def test_a_cell_whose_spread_is_larger_is_kept_apart():
    generator = np.random.default_rng(0)
    cells = {name: generator.normal(86, 0.2, (3, 3)).tolist() for name in "abcdef"}
    alike = Spreads.of(cells)
    assert (alike.apart, alike.usual.freedom) == (frozenset(), 36)
    found = Spreads.of({**cells, "unstable": [[84.0, 86.2], [85.0, 86.9]]})
    assert found.apart == {"unstable"}
    assert found["a"] == found.usual
    assert found.usual.deviation == pytest.approx(alike.usual.deviation)


def test_a_verdict_of_a_search():
    expected = {(-0.2, 0.2): "met", (-0.6, 0.4): "undecided", (-1.0, 0.4): "missed"}
    assert {given: tune_lr.verdict(*given) for given in expected} == expected
