"""Tuning on real ranks: all ranks agree, within the budget, on a plan near the best times."""

import statistics
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch

from largebatch.comm import (
    ALGORITHMS,
    Measurement,
    Plan,
    Ring,
    Rule,
    Topology,
    Tuned,
    candidates,
    estimate_profile,
    tune,
)
from largebatch.comm.tuning.tune import fit_and_plan
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow("measures on up to four ranks")

SMALL = (4, 1024, 65_536, 2**20)

#: Time over the budget, for a machine that does other work too.
SLACK_SECONDS = 15


def tuned(sizes, budget_seconds, race_seconds=0.0, chunks_bytes=()):
    """Tune on nodes of two ranks; return what was found, and the seconds that it took."""
    start = time.monotonic()
    found = tune(
        Topology.from_environment(2),
        sizes_bytes=sizes,
        budget_seconds=budget_seconds,
        race_seconds=race_seconds,
        chunks_bytes=chunks_bytes,
    )
    return found, time.monotonic() - start


def test_all_ranks_get_the_same_plan_close_to_the_best_times():
    results = run_ranks(4, tuned, SMALL, 5.0, 5.0, (2**18,))
    found, seconds = results[0]
    assert all(other == found for other, _ in results)
    assert seconds < 10 + SLACK_SECONDS
    assert found.plan == found.final.plan
    assert found.final.finalists[0].plan == Plan.single()
    assert any("race" in note for note in found.notes) == (not found.final.decided)
    times: dict[int, dict[Rule, float]] = {}
    for m in found.measurements:
        times.setdefault(m.size_bytes, {})[m.rule] = statistics.median(m.seconds)
        assert min(m.seconds) > 0
    measured = tuple(sorted(times))
    assert measured == SMALL[: len(measured)]  # all, unless the machine does much other work
    assert len(found.notes) >= len(SMALL) - len(measured)
    plan = fit_and_plan(found.measurements, found.cluster.topology).plan
    for size, candidates_ in times.items():
        chosen = replace(plan.rule_for(size), max_bytes=None)
        assert candidates_[chosen] <= 1.05 * min(candidates_.values())
        if candidates_[Rule("ring")] <= 1.05 * min(candidates_.values()):
            assert chosen == Rule("ring")
    expected = set(candidates(Topology.of(4, 2), chunks_bytes=(2**18,)))
    if measured == SMALL:
        assert set(times[2**20]) | set(times[65_536]) == expected
    assert not any(rule.wire_dtype for rule in expected), "lossy unless asked for"
    for m in found.measurements:  # the calibrated model reproduces them
        predicted = found.cluster.seconds(m.rule, m.size_bytes)
        assert predicted == pytest.approx(m.median_seconds)


class Slow(Ring):
    """Does nothing for 20 ms plus 0.2 us per byte."""

    def __init__(self, name):
        self.name = name

    def all_reduce(self, tensor, topology):
        time.sleep(0.02 + 2e-7 * tensor.numel() * tensor.element_size())


AFTER_A_SLOW_ONE, OF_A_SLOW_RING = (1024, 2**18, 2**20, 2**22), (1024, 2**18, 2**20, 2**22, 2**24)


def with_slow_ones():
    topology = Topology.from_environment(1)
    with pytest.raises(ValueError, match="sizes_bytes: 6 bytes are not a whole number of"):
        tune(topology, sizes_bytes=(1024, 6))
    with pytest.raises(RuntimeError, match=r"^topology: 1 rank has nothing .*; valid: 2 ranks"):
        tune(Topology.of(1, 1))
    with mock.patch.dict(ALGORITHMS, slow=Slow("slow")):
        after_a_slow_one = tuned(AFTER_A_SLOW_ONE, 6.0)
    with mock.patch.dict(ALGORITHMS, {"ring": Slow("ring")}, clear=True):
        return after_a_slow_one, tuned(OF_A_SLOW_RING, 4.0)


def test_a_slow_candidate_is_dropped_but_never_the_ring_and_sizes_beyond_the_budget_are_named():
    (found, seconds), (of_ring, seconds_of_ring) = run_ranks(2, with_slow_ones)[0]
    assert seconds < 6 + SLACK_SECONDS
    measured = {(m.rule.algorithm, m.size_bytes) for m in found.measurements}
    assert ("slow", 2**20) in measured
    assert ("slow", 2**22) not in measured
    assert all(("ring", size) in measured for size in AFTER_A_SLOW_ONE)

    assert seconds_of_ring < 4 + SLACK_SECONDS  # 2**24 bytes alone would take 3.4, and 2**22 0.86
    sizes = sorted({m.size_bytes for m in of_ring.measurements})
    assert sizes == list(OF_A_SLOW_RING[: len(sizes)])
    assert 2**24 not in sizes
    assert of_ring.notes[: len(OF_A_SLOW_RING) - len(sizes)] == tuple(
        f"no time was left to measure {size:,} bytes" for size in OF_A_SLOW_RING[len(sizes) :]
    )


def threshold(latency_seconds, profile=None):
    """The fusion threshold where each rule takes a latency, and a nanosecond per byte."""
    topology = Topology.of(4, 2)
    measurements = [
        Measurement(rule, size, (latency_seconds + 1e-9 * size,))
        for size in [4**k for k in range(5, 14)]
        for rule in candidates(topology, chunks_bytes=(2**20,))
        if rule.chunk_bytes is None or rule.chunk_bytes < size
    ]
    plan = fit_and_plan(measurements, topology, profile=profile).plan
    assert plan.rules == (Rule("ring"),)
    return plan.fusion_threshold_bytes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{}", "was not written by comm tune: 'version'"),
        ('{"version": 7}', "version 7; valid: 1"),
        ("[", "was not written by comm tune: Expecting"),
        ('{"version": 1, "nodes": 3}', "was not written by comm tune"),
    ],
)
def test_a_file_in_another_format_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "tuned.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        Tuned.load(path)
    assert str(path) in str(error.value)


def test_the_fusion_threshold_hides_what_it_can_of_a_given_or_of_some_model():
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(20)))
    one, short, long = (
        estimate_profile(model, [torch.empty(1, 1000)], seconds) for seconds in (1e-6, 0.15, 1000.0)
    )
    assert 2**20 <= threshold(1e-4) < 2**23  # latency counts, and what is late
    assert threshold(1e-2, one) > 80_000_000  # nothing can be hidden: a single message
    assert threshold(1e-4, short) < 2**23  # small buckets leave little after backward
    assert threshold(1e-4, long) == 25 * 2**20  # irrelevant: DDP's default
