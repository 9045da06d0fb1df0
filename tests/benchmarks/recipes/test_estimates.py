"""The arithmetic behind published intervals and verdicts, against its definitions."""

import statistics

import pytest
from scipy.stats import ttest_ind

from benchmarks.recipes import tune_lr
from benchmarks.recipes.spread import Spread, half_of


def test_intervals_of_differences_are_those_of_t_tests():
    one, other = [86.1, 86.4, 85.9], [85.2, 85.6]
    distance = statistics.mean(one) - statistics.mean(other)
    pooled, of_one, of_other = Spread.of([one, other]), Spread.of([one]), Spread.of([other])
    for spreads, equal in (((pooled, pooled), True), ((of_one, of_other), False)):
        expected = ttest_ind(one, other, equal_var=equal).confidence_interval(0.95)
        half = half_of(list(zip(spreads, (3, 2), strict=True)))
        assert (distance - half, distance + half) == pytest.approx(expected)


def test_a_verdict_of_a_search():
    expected = {(-0.2, 0.2): "met", (-0.6, 0.4): "undecided", (-1.0, 0.4): "missed"}
    assert {given: tune_lr.verdict(*given) for given in expected} == expected
