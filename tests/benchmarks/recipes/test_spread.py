"""The spread between seeds: pooled where it is the same, and kept apart where it is not."""

import statistics

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_ind

from benchmarks.recipes.spread import Spread, Spreads, difference, half_of


def test_intervals_are_those_of_a_t_test():
    one, other = [86.1, 86.4, 85.9], [85.2, 85.6]
    distance = statistics.mean(one) - statistics.mean(other)
    pooled, of_one, of_other = Spread.of([one, other]), Spread.of([one]), Spread.of([other])
    for spreads, equal in (((pooled, pooled), True), ((of_one, of_other), False)):
        low, high = ttest_ind(one, other, equal_var=equal).confidence_interval(0.95)
        half = half_of(list(zip(spreads, (3, 2), strict=True)))
        assert (distance - half, distance + half) == pytest.approx((low, high))
    low, high = ttest_1samp(one, 0).confidence_interval(0.95)
    assert 2 * of_one.half(3) == pytest.approx(high - low)


def test_equal_spreads_that_are_measured_apart_are_not_one_spread():
    one, other = [86.0, 86.2, 86.4], [85.0, 85.2, 85.4]
    low, high = ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    apart = [(Spread.of([one]), 3), (Spread.of([other]), 3)]
    assert apart[0][0].deviation == pytest.approx(apart[1][0].deviation)
    assert 2 * half_of(apart) == pytest.approx(high - low)
    equal = [(Spread(0.2, 2), 3), (Spread(0.2, 2), 3)]
    assert half_of(equal) == pytest.approx(half_of(apart))
    assert half_of([equal[0], equal[0]]) > 1.5 * half_of(equal)


def test_a_difference_whose_interval_holds_zero_is_unresolved():
    spread = Spread(0.2, 10)
    assert difference([86.1, 86.3], spread, [86.0, 86.2], spread) == "+0.10 ± 0.45, unresolved"
    assert difference([86.1, 86.3], spread, [87.0], spread) == "-0.80 ± 0.55"
    assert half_of([(Spread(0.0, 3), 2)]) == 0


def test_a_cell_whose_spread_is_larger_is_kept_apart():
    generator = np.random.default_rng(0)
    cells = {name: generator.normal(86, 0.2, (3, 3)).tolist() for name in "abcdef"}
    alike = Spreads.of(cells)
    assert (alike.apart, alike.larger) == (frozenset(), None)
    assert alike.usual.freedom == 36
    assert 0.15 < alike.usual.deviation < 0.25
    unstable, other = [[84.0, 86.2], [85.0, 86.9]], [[70.0, 72.5]]
    found = Spreads.of({**cells, "unstable": unstable, "other": other})
    assert found.usual.deviation == pytest.approx(alike.usual.deviation)
    assert found["a"] == found.usual
    assert found.apart == {"unstable", "other"}
    assert found["unstable"] == found["other"]
    assert found["other"].freedom == 3
    assert found["other"].deviation == pytest.approx(Spread.of([*unstable, *other]).deviation)


def test_a_cell_that_spreads_among_identical_runs_is_kept_apart():
    found = Spreads.of({"a": [[86.0, 86.0]], "b": [[85.0, 85.0]], "c": [[84.0, 85.0]]})
    assert found.apart == {"c"}
    assert found["a"].deviation == 0
    assert Spreads.of({"a": [[86.0, 86.0]], "b": [[85.0, 85.0]]}).apart == frozenset()


def test_cells_with_the_same_spread_are_rarely_kept_apart():
    generator = np.random.default_rng(0)
    trials = [
        Spreads.of({cell: generator.normal(86, 0.2, (2, 2)).tolist() for cell in range(10)})
        for _ in range(200)
    ]
    assert sum(bool(found.apart) for found in trials) <= 6  # 1 % of them are expected


def test_single_runs_tell_no_spread():
    assert Spread.of([[86.0], [85.0]]) is None
    found = Spreads.of({"one": [[86.0]], "two": [[85.0, 85.2]]})
    assert found["one"] == found.usual == Spread.of([[85.0, 85.2]])
    with pytest.raises(ValueError, match="valid: two equal runs at least"):
        Spreads.of({"one": [[86.0]]})
