"""The winner of a race and the confidence in the order, as a pure function of the times."""

import itertools
import math
from random import Random

import pytest
from scipy import stats

from largebatch.comm.tuning.verdict import LOOKS, MOST_CONTENDERS, Ratio, judge, ratio

PAIRS = math.comb(MOST_CONTENDERS, 2)


def noisy(seconds, rounds, random, spread=0.01):
    return [seconds * math.exp(random.gauss(0, spread)) for _ in range(rounds)]


@pytest.mark.parametrize("rounds", LOOKS)
@pytest.mark.parametrize("factor", [0.2, 1.0, 1.1])
@pytest.mark.parametrize("spread", [0.001, 0.3])
def test_the_interval_is_that_of_scipys_paired_t_test(rounds, factor, spread):
    random = Random(rounds)
    a, b = noisy(factor, rounds, random, spread), noisy(1.0, rounds, random, spread)
    found = ratio(a, b)
    test = stats.ttest_rel([math.log(x) for x in a], [math.log(x) for x in b])
    low, high = test.confidence_interval(1 - 0.05 / len(LOOKS) / PAIRS)
    assert found.low == pytest.approx(math.exp(low), rel=1e-3)
    assert found.high == pytest.approx(math.exp(high), rel=1e-3)
    assert found.ratio == pytest.approx(stats.gmean(a) / stats.gmean(b))
    back = ratio(b, a)
    assert (back.low, back.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_disturbances_of_a_whole_round_do_not_widen_the_interval():
    load = (1.0, 3.0, 1.4, 2.2, 1.0, 5.0)
    found = ratio([1.1 * x for x in load], list(load))
    assert (found.low, found.high) == pytest.approx((1.1, 1.1))
    assert found.order == "slower"


def test_no_comparison_of_any_two_at_any_look_misses_in_19_of_20_races():
    random, missed, races = Random(0), 0, 600
    for _ in range(races):
        times = [noisy(1.0, max(LOOKS), random, 0.1) for _ in range(MOST_CONTENDERS)]
        found = [
            ratio(a[:rounds], b[:rounds])
            for a, b in itertools.combinations(times, 2)
            for rounds in LOOKS
        ]
        missed += any(not of.low <= 1 <= of.high for of in found)
    assert 0 < missed <= 0.05 * races


@pytest.mark.parametrize(
    ("low", "high", "order"),
    [
        (1.01, 1.3, "slower"),
        (0.7, 0.99, "faster"),
        (0.97, 1.3, "open"),
        (0.99, 1.019, "equal"),
        (1.001, 1.02, "equal"),
    ],
)
def test_an_interval_says_slower_faster_equal_or_nothing(low, high, order):
    assert Ratio(math.sqrt(low * high), low, high).order == order


def judged(*seconds, rounds=6, spread=0.002):
    random = Random(1)
    return judge({i: noisy(s, rounds, random, spread) for i, s in enumerate(seconds)})


def test_the_fastest_wins_if_all_others_are_slower():
    found = judged(1.5, 1.2, 1.0, 1.3)
    assert (found.fastest, found.winner, found.settled, found.remaining) == (2, 2, True, (2,))
    assert found.ratios[0].low > 1.48
    assert found.ratios[0].high < 1.52


def test_a_tie_keeps_the_simpler_one():
    found = judged(1.5, 1.003, 1.0, 1.001, rounds=12)
    assert found.ratios[1].order == "equal"
    assert (found.winner, found.settled) == (1, True)
    assert found.remaining == (1, 2, 3)


def test_an_open_order_keeps_the_simpler_one_only_if_it_was_hardly_slower():
    simple = (1.1, 0.9, 1.0)
    close = judge({0: [1.03 * s for s in simple], 1: (1.0, 1.0, 1.0)})
    apart = judge({0: [1.08 * s for s in simple], 1: (1.0, 1.0, 1.0)})
    for found, winner in ((close, 0), (apart, 1)):
        assert found.fastest == 1
        assert found.ratios[0].order == "open"
        assert not found.settled
        assert found.remaining == (0, 1)
        assert found.winner == winner


def test_contenders_that_were_dropped_are_not_needed():
    random = Random(2)
    found = judge({1: noisy(1.0, 6, random), 3: noisy(0.5, 6, random)})
    assert (found.winner, set(found.ratios)) == (3, {1, 3})


def test_other_numbers_of_rounds_or_contenders_are_refused():
    with pytest.raises(ValueError, match="4 and 4 rounds; valid: 3, 6, 12, 24"):
        ratio([1.0] * 4, [1.0] * 4)
    with pytest.raises(ValueError, match="3 and 6 rounds"):
        ratio([1.0] * 3, [1.0] * 6)
    for contenders in (0, 5):
        with pytest.raises(ValueError, match=f"times: {contenders} contenders; valid: 1 to 4"):
            judge({index: [1.0] * 3 for index in range(contenders)})
