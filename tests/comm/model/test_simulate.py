"""The simulated step: DDP's buckets are reduced one after another while backward runs."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from largebatch.comm import (
    ALGORITHMS,
    Cluster,
    Gradient,
    Level,
    Links,
    Measurement,
    Plan,
    Profile,
    Rule,
    Topology,
    TopologyError,
    candidates,
    predict_plan,
    simulate,
)
from largebatch.comm.model.calibrate import Calibration
from largebatch.comm.model.simulate import best_threshold, buckets

LINKS = Links(Level.of(5, 100), Level.of(10, 50))


def profile(sizes, *, step=3.0):
    """A profile with equal work for every gradient, and a third of the step in forward."""
    backward = step * 2 / 3
    each = backward / len(sizes)
    gradients = [Gradient(f"g{i}", size, (i + 1) * each) for i, size in enumerate(sizes)]
    return Profile(tuple(gradients), step / 3, backward)


sizes = st.lists(st.integers(1, 2_000_000).map(lambda n: 4 * n), min_size=1, max_size=30)


@given(sizes, st.lists(st.integers(1, 2**24), min_size=1, max_size=4))
def test_buckets_are_those_of_ddp(sizes, limits):
    tensors = [torch.empty(size // 4) for size in sizes]
    rules = (Rule("ring"),)
    drawn = Plan(rules, limits[0]) if len(limits) == 1 else Plan(rules, segments=tuple(limits))
    default = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20]
    for plan, caps in ((drawn, limits), (Plan(rules), default)):
        expected, _ = dist._compute_bucket_assignment_by_size(tensors, caps, [False] * len(sizes))
        found = buckets(profile(sizes).gradients, plan)
        assert [[int(g.name[1:]) for g in bucket] for bucket in found] == expected


@given(sizes, st.integers(1, 2**26), st.sampled_from(sorted(ALGORITHMS)), st.integers(1, 2**22))
def test_a_step_is_neither_shorter_than_its_parts_nor_longer_than_their_sum(
    sizes, threshold, name, limit
):
    model = profile(sizes, step=0.01)
    cluster = Cluster.of(64, 8, LINKS)
    plan = Plan((Rule(name, limit), Rule("ring")), threshold)
    run = simulate(model, cluster, plan)
    longest = model.compute_seconds + run.communication_seconds
    assert model.compute_seconds <= run.step_seconds <= longest * (1 + 1e-9)
    late = simulate(model, replace(cluster, straggler_sigma=0.02), plan)
    wait = 0.01 * 0.02 * (2 * math.log(64)) ** 0.5
    assert (run.waiting_seconds, late.waiting_seconds) == (0, pytest.approx(wait))
    assert run.step_seconds <= late.step_seconds <= run.step_seconds + wait * (1 + 1e-9)
    free = 0.0
    for r, bucket in zip(run.reductions, buckets(model.gradients, plan), strict=True):
        assert r.size_bytes == sum(gradient.size_bytes for gradient in bucket)
        assert r.rule == plan.rule_for(r.size_bytes)
        assert r.ready_seconds == bucket[-1].ready_seconds
        assert r.start_seconds == max(free, r.ready_seconds)
        free = r.end_seconds
        alone = cluster.seconds(r.rule, r.size_bytes)
        assert r.end_seconds - r.start_seconds == pytest.approx(alone)
    exposed = max(0.0, free - model.backward_seconds)  # what backward does not hide
    assert run.exposed_seconds == pytest.approx(exposed, abs=1e-12)


def test_unequal_nodes_are_refused_only_by_algorithms_that_need_equal_ones():
    cluster = Cluster(Topology(((0, 1), (2,))), LINKS)
    assert simulate(profile([400]), cluster, Plan.single()).exposed_seconds > 0
    with pytest.raises(TopologyError, match=r"^algorithm: nodes have 2, 1 ranks"):
        simulate(profile([400]), cluster, Plan.single("hierarchical"))
    assert "hierarchical" not in {r.algorithm for r in candidates(cluster.topology)}


@pytest.mark.parametrize("gpus", [8, 32_768])
def test_the_chosen_plan_is_no_slower_than_any_single_rule(gpus):
    model = profile([400, 4_000_000, 40_000, 10_000_000] * 5, step=0.02)
    cluster = Cluster.of(gpus, 8, LINKS)
    rules = candidates(cluster.topology, chunks_bytes=(2**20,))
    chosen = simulate(model, cluster, predict_plan(model, cluster, rules)).step_seconds
    for rule in rules:
        threshold = best_threshold(model, cluster, (rule,))
        single = simulate(model, cluster, Plan((rule,), threshold)).step_seconds
        # 2 % for sizes between the tried ones, and for keeping DDP's threshold.
        assert chosen <= single * 1.02


def test_half_precision_summed_in_fp32_leaves_the_algorithms_that_can():
    cluster = Topology.of(16, 8)
    whole = candidates(cluster, chunks_bytes=(2**20,))
    found = candidates(cluster, chunks_bytes=(2**20,), wire_dtypes=("fp16",), sum_dtype="fp32")
    half = Rule("hierarchical", wire_dtype="fp16", sum_dtype="fp32")
    assert set(found) == {*whole, half, replace(half, chunk_bytes=2**20)}


def test_a_calibrated_cluster_reproduces_the_measurements():
    topology = Topology.of(8, 4)
    cut = Rule("hierarchical", chunk_bytes=4096)
    known = [
        Measurement(Rule("hierarchical"), 1024, (2.0, 1.0, 3.0)),
        Measurement(Rule("hierarchical"), 4096, (4.0,)),
        Measurement(Rule("hierarchical"), 65536, (50.0,)),
        Measurement(cut, 65536, (30.0,)),
    ]
    cluster = Cluster(topology, LINKS, Calibration.of(known, topology, LINKS))
    for m in known:
        assert cluster.seconds(m.rule, m.size_bytes) == pytest.approx(m.median_seconds)
    # Up to its chunk size, a rule with chunks sends whole messages.
    assert cluster.seconds(cut, 4096) == pytest.approx(4.0)
    assert 2.0 < cluster.seconds(Rule("hierarchical"), 2048) < 4.0
    plain = Cluster(topology, LINKS)
    assert cluster.seconds(Rule("ring"), 4096) == plain.seconds(Rule("ring"), 4096)


@pytest.mark.parametrize(
    ("ready", "forward"), [([], 1.0), ([0.5, 0.2], 1.0), ([2.0], 1.0), ([0.5], -1.0)]
)
def test_an_invalid_profile_is_refused(ready, forward):
    with pytest.raises(ValueError, match="profile"):
        Profile(tuple(Gradient("weight", 4, seconds) for seconds in ready), forward, 1.0)
