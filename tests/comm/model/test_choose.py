"""The rules chosen from times are near the best, and flat wherever nothing is faster."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.comm import ALGORITHMS, Plan, Rule, choose

FLAT = Rule("ring")
CANDIDATES = (
    FLAT,
    *(Rule(name) for name in ALGORITHMS if name != "ring"),
    Rule("hierarchical", chunk_bytes=2**20),
    Rule("hierarchical", wire_dtype="fp16"),
)

seconds = st.floats(1e-7, 1e3)
measured = st.dictionaries(
    st.integers(4, 2**30),
    st.dictionaries(st.sampled_from(CANDIDATES), seconds, min_size=1),
    min_size=1,
    max_size=12,
)


def rule_at(rules, size):
    return replace(Plan(rules).rule_for(size), max_bytes=None)


@given(measured, st.floats(0, 0.2))
def test_the_choice_is_near_the_best_at_every_size_and_flat_where_nothing_beats_that(
    times, tolerance
):
    rules = choose(times, tolerance=tolerance)
    for size, candidates in times.items():
        limit = min(candidates.values()) * (1 + tolerance)
        assert candidates[rule_at(rules, size)] <= limit
        if candidates.get(FLAT, math.inf) <= limit:
            assert rule_at(rules, size) == FLAT
    assert len(rules) <= len(times)
    for rule, after in pairwise(rules):
        assert replace(rule, max_bytes=None) != replace(after, max_bytes=None)


def test_one_rule_is_preferred_to_two_that_are_slightly_faster():
    grouped, cut = Rule("hierarchical"), Rule("hierarchical", chunk_bytes=2**20)
    times = {
        1000: {FLAT: 2.0, grouped: 1.0, cut: 1.04},
        4000: {FLAT: 2.0, grouped: 1.2, cut: 1.0},
        16000: {FLAT: 1.0, grouped: 1.2, cut: 1.3},
    }
    assert choose(times) == (Rule("hierarchical", 8000, chunk_bytes=2**20), Rule("ring"))


@pytest.mark.parametrize("times", [{}, {4: {}}, {4: {FLAT: math.nan}}])
def test_missing_or_impossible_times_are_refused(times):
    with pytest.raises(ValueError, match="times"):
        choose(times)
