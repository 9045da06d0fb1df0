"""The last stage: rates beside the best one until it has neighbours, then second seeds."""

import math

from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.tune.learning_rate.line import (
    LONGEST,
    STEP,
    WORST,
    best_place,
    next_place,
    rate_at,
)


def walk(centre, best, diverges=math.inf, lowest=0.0, highest=math.inf, second=0.0):
    """Results of the whole stage, in order, where accuracy falls away from the best rate."""
    results = {}
    while (following := next_place(results, centre, lowest, highest)) not in results:
        rate = rate_at(centre, following[0])
        off = abs(math.log(rate / best))
        score = (90 - 10 * off + second * following[1] * off, -off)
        results[following] = WORST if rate >= diverges else score
    return results


@given(st.floats(0.1, 10), st.floats(-1.5, 1.5), st.floats(0.0, 2.0))
def test_the_best_rate_has_a_neighbour_on_each_side_and_two_seeds(centre, off, gap):
    best = centre * STEP**off
    results = walk(centre, best, diverges=best * STEP ** (0.6 + gap))
    place = best_place(results)
    assert abs(math.log(rate_at(centre, place) / best)) <= 0.51 * math.log(STEP)
    assert {(place, 1), (place - 1, 0), (place + 1, 0)} <= results.keys()
    assert sum(seed for _, seed in results) == 2
    # No rate is tried above one that diverged.
    assert sum(score == WORST for score in results.values()) <= 1
    assert len(results) <= 7


def test_the_line_ends_at_the_range_and_after_a_number_of_rates():
    assert {place for place, _ in walk(1.0, 10.0, highest=2.0)} == {-1, 0, 1}
    assert {place for place, _ in walk(1.0, 0.1, lowest=0.3)} == {-2, -1, 0}
    assert len({place for place, _ in walk(1.0, 1e6)}) == LONGEST
    results = walk(1.0, 0.5, diverges=0.9)  # as the centre does: lower rates are tried
    assert results[0, 0] == WORST
    assert rate_at(1.0, best_place(results)) in (0.667, 0.444)


def test_the_mean_of_two_seeds_decides_between_the_best_two():
    results = {(0, 0): (90.0, -1.0), (1, 0): (89.0, -1.0), (-1, 0): (80.0, -1.0)}
    assert best_place(results) == 0
    assert best_place({**results, (0, 1): (85.0, -1.0)}) == 0  # the second one has no other yet
    assert best_place({**results, (0, 1): (85.0, -1.0), (1, 1): (88.0, -1.0)}) == 1


@given(st.integers(0, 54), st.integers(0, 54), st.integers(0, 54))
def test_of_places_with_equally_many_right_images_the_lower_loss_is_the_best(one, other, moved):
    """Of 54 images, however they are spread over two seeds."""
    moved = min(moved, 54 - one, other)
    results = {(0, 0): (100 * one / 54, -1.0), (0, 1): (100 * other / 54, -1.0)}
    results |= {
        (1, 0): (100 * (one + moved) / 54, -0.9),
        (1, 1): (100 * (other - moved) / 54, -0.9),
    }
    assert best_place(results) == 1
