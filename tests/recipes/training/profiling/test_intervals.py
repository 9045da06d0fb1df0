"""Sets of times against sets of whole seconds."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.training.profiling.intervals import (
    difference,
    in_rows,
    intersection,
    length,
    union,
)

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12).map(
    lambda pairs: [(start, start + long) for start, long in pairs]
)


def seconds(intervals):
    return {second for start, end in intervals for second in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_sets_of_times_are_those_of_their_seconds(one, other):
    ones, others = union(one), union(other)
    assert seconds(ones) == seconds(one)
    assert length(ones) == len(seconds(one))
    assert seconds(intersection(ones, others)) == seconds(one) & seconds(other)
    assert seconds(difference(ones, others)) == seconds(one) - seconds(other)
    for found in (ones, intersection(ones, others), difference(ones, others)):
        assert all(start < end for start, end in found)
        assert all(a[1] <= b[0] for a, b in pairwise(found))


@given(INTERVALS)
def test_none_overlaps_another_in_its_row_and_no_row_is_needless(intervals):
    rows = in_rows(intervals)
    for row in set(rows):
        times = sorted(i for i, r in zip(intervals, rows, strict=True) if r == row)
        assert all(a[1] <= b[0] for a, b in pairwise(times))
    busiest = max((sum(a <= s < b for a, b in intervals) for s in range(50)), default=0)
    instants = any(start == end for start, end in intervals)
    assert instants or max(rows, default=-1) + 1 == busiest
