"""The race at the end of tuning: measured times overrule the prediction."""

from dataclasses import replace
from random import Random
from unittest import mock

import pytest

from largebatch.comm import (
    Cluster,
    Level,
    Links,
    Measurement,
    Plan,
    Rule,
    Topology,
    Tuned,
    candidates,
    simulate,
)
from largebatch.comm.tuning import race as module
from largebatch.comm.tuning.race import finalists, plain_profile, race
from largebatch.comm.tuning.tune import fit_and_plan

DEFAULT = Plan.single()
SMALL, LARGE = (
    Plan((Rule("leader", chunk_bytes=chunk),), 2**23) for chunk in (2 * 2**20, 4 * 2**20)
)
WHOLE = Plan.single("leader")
PLANS = (DEFAULT, WHOLE, SMALL, LARGE)


class Track:
    """Laps of known times with 1 % of noise, on a clock that stands still between them."""

    def __init__(self, seconds):
        self.seconds, self.random, self.laps = seconds, Random(0), []

    def __call__(self, topology, profile, backward_seconds, dtype):
        return self

    def lap(self, plan, *, warm_up=False):
        self.laps.append((plan, warm_up))
        self.clock += self.seconds[plan]
        return self.seconds[plan] * self.random.gauss(1, 0.01)

    clock = 0.0

    def slowest(self, seconds):
        return seconds

    def monotonic(self):
        return self.clock


def raced(seconds, favourite, budget_seconds=1000.0, track=None):
    track = track or Track(dict(zip(PLANS, seconds, strict=True)))
    with (
        mock.patch.object(module, "_Track", track),
        mock.patch.object(module.time, "monotonic", track.monotonic),
    ):
        found = race(
            PLANS,
            favourite,
            Topology.of(8, 4),
            plain_profile(2**24, 1.0),
            budget_seconds=budget_seconds,
            backward_seconds=1.0,
        )
    return found, track


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ((1.5, 1.4, 1.26, 1.0), LARGE),  # not the favourite, which the prediction preferred
        ((3.0, 1.004, 1.1, 1.0), WHOLE),  # as fast as the fastest, and simpler
        ((1.001, 1.004, 1.1, 1.0), DEFAULT),
        ((1.06, 1.05, 1.0, 1.04), SMALL),
    ],
)
def test_the_simplest_of_the_fastest_wins(seconds, winner):
    found, _ = raced(seconds, favourite=SMALL)
    assert found.plan == winner
    assert found.decided


def test_plans_take_turns_and_the_slow_ones_are_dropped():
    found, track = raced((3.0, 1.004, 1.3, 1.0), favourite=SMALL)
    assert track.laps[:4] == [(plan, True) for plan in PLANS]
    laps = [plan for plan, warm_up in track.laps if not warm_up]
    assert [laps[i : i + 4].index(DEFAULT) for i in (0, 4, 8)] == [0, 3, 2]
    assert all(set(laps[i : i + 4]) == set(PLANS) for i in (0, 4, 8))
    counts = [len(finalist.seconds) for finalist in found.finalists]
    assert counts == [laps.count(plan) for plan in PLANS] == [3, 12, 3, 12]
    assert found.finalists[found.fastest].plan in (WHOLE, LARGE)
    assert found.ratios(0) == pytest.approx((3, 3, 3), rel=0.1)


def test_load_that_comes_and_goes_does_not_decide():
    """A round is disturbed as a whole, so times are compared within each round."""
    load = iter([5.0] * 4 + [1.0] * 4 + [3.0] * 4 + [1.5] * 40)
    track = Track(dict(zip(PLANS, (1.5, 1.4, 1.0, 1.3), strict=True)))
    lap = track.lap
    track.lap = lambda plan, warm_up=False: lap(plan) * (1.0 if warm_up else next(load))
    found, _ = raced(None, favourite=DEFAULT, track=track)
    assert found.plan == SMALL
    assert found.ratios(0) == pytest.approx([1.5] * len(found.ratios(0)), rel=0.1)


def test_the_budget_is_kept_and_the_favourite_wins_without_three_rounds():
    for budget_seconds, winner in ((35.0, SMALL), (60.0, WHOLE)):
        found, track = raced((4.0, 2.0, 1.99, 2.05), SMALL, budget_seconds)
        assert track.clock <= budget_seconds
        assert (found.plan, found.decided) == (winner, winner == WHOLE)


LINKS = Links(Level.of(10, 20), Level.of(30, 1), host_seconds_per_byte=3e-10)


def test_the_finalists_are_ddps_default_and_the_best_by_prediction():
    cluster = Cluster.of(8, 4, LINKS)
    profile = plain_profile(100 * 2**20, 0.5)
    rules = candidates(cluster.topology, chunks_bytes=(2**21, 2**22))
    chosen = Plan((Rule("leader", 2**20), Rule("hierarchical")), 2**23)
    found = finalists(chosen, rules, profile, cluster)
    assert found[0] == DEFAULT
    assert chosen in found
    assert len(found) == 4
    assert found.index(chosen) == 3  # has the most rules

    def step(plan):
        return simulate(profile, cluster, plan).step_seconds

    slowest = max(step(plan) for plan in found[1:3])
    raced = {plan.rules for plan in found}
    for rule in rules:
        if (rule,) not in raced:
            assert step(Plan((rule,), found[1].fusion_threshold_bytes)) >= slowest
    assert finalists(DEFAULT, rules[:1], profile, cluster)[0] == DEFAULT


def test_a_result_with_a_race_is_saved_and_loaded(tmp_path):
    topology = Topology.of(8, 4)
    measurements = [
        Measurement(rule, size, (1e-4 + 1e-9 * size,))
        for size in (2**16, 2**20, 2**24)
        for rule in candidates(topology)
    ]
    found, _ = raced((1.5, 1.4, 1.26, 1.0), favourite=SMALL)
    tuned = replace(fit_and_plan(measurements, topology), plan=found.plan, final=found)
    tuned.save(tmp_path / "tuned.json")
    assert Tuned.load(tmp_path / "tuned.json") == tuned
