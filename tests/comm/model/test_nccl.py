"""NCCL's model, against values computed by hand from the constants of its source."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.comm import ALGORITHMS, Cluster, Nccl, PlanError, Rule, Topology

#: V100 with two EDR per node at line rate.
V100 = Nccl(120.0, 25.0, nics=2)
PCIE = replace(V100, nvlink=False)
SIZE = 25 * 2**20
MANY = Topology.of(2048, 8)


MIB = 2**20
SIMPLE = 8.4 + 2 * 28 * 3.4 + 2 * 3 * 9.6  # microseconds of a ring on 4 nodes of 8
#: Links, bytes, ranks, nodes and way; microseconds of latency, and bytes over bytes per second.
BY_HAND = [
    # 4.4 is the base; 7 steps in the node, log2(256) between; NCCL takes 0.8 of LL128 at 16 MiB.
    (V100, SIZE, 2048, 256, ("tree", "LL128"), 4.4 + 2 * (7 * 1.2 + 8 * 8.5),
     SIZE / (0.5 * min(0.9 * 25, 80) * 0.915 * 0.8e9)),
    (V100, MIB, 8, 1, ("ring", "LL"), 3.6 + 14 * 0.47, 2 * 7 / 8 * MIB / (0.25 * 120e9)),
    (V100, MIB, 8, 1, ("ring", "LL128"), 10.0 + 14 * 1.9, 2 * 7 / 8 * MIB / (0.92 * 120e9)),
    (V100, MIB, 8, 1, ("ring", "Simple"), 8.4 + 14 * 3.4, 2 * 7 / 8 * MIB / 120e9),
    # Between nodes, LL has more latency, and Simple has it for large messages.
    (V100, 1024, 32, 4, ("ring", "LL"), 3.6 + 2 * 28 * 0.47 * 1.8 + 2 * 3 * 2.7,
     2 * 31 / 32 * 1024 / (0.25 * 25e9)),
    (V100, 131071, 32, 4, ("ring", "Simple"), SIMPLE, 2 * 31 / 32 * 131071 / 25e9),
    (V100, 131072, 32, 4, ("ring", "Simple"), 1.9 * SIMPLE, 2 * 31 / 32 * 131072 / 25e9),
    # Trees are limited, whatever the links are.
    (Nccl(400.0, 400.0), 2**30, 64, 8, ("tree", "Simple"), 2 * (7 * 28 + 3 * 50), 2 * 2**30 / 80e9),
    (PCIE, MIB, 64, 8, ("ring", "LL"), 3.6 + 2 * 56 * 1.0 * 1.8 + 2 * 7 * 2.7,
     2 * 63 / 64 * MIB / (0.25 * 25e9)),
]  # fmt: skip


@pytest.mark.parametrize(("links", "size", "ranks", "nodes", "way", "latency", "rest"), BY_HAND)
def test_a_way_takes_the_time_that_its_constants_give(
    links, size, ranks, nodes, way, latency, rest
):
    found = links.all_reduces(size, ranks, nodes)
    assert found[way] == pytest.approx(latency * 1e-6 + rest)
    assert ("LL128" in {protocol for _, protocol in found}) == links.nvlink
    if size == SIZE:
        assert min(found, key=found.get) == way


def test_each_call_costs_the_host_its_time():
    free = replace(V100, host_seconds=0.0)

    def overhead(rule, topology=MANY):
        costs = (one.seconds(rule, SIZE, topology) for one in (V100, free))
        return round((next(costs) - next(costs)) / V100.host_seconds)

    assert overhead(Rule("ring")) == 1
    assert overhead(Rule("hierarchical")) == overhead(Rule("leader")) == 3
    assert overhead(Rule("hierarchical", chunk_bytes=10 * 2**20)) == 9
    # Halving and doubling on 2,048 ranks: 22 messages, each a send, a receive and an addition.
    assert overhead(Rule("halving-doubling")) == 66
    assert overhead(Rule("parameter-server"), Topology.of(16, 8)) == 3 * 2 * 15


@given(st.sampled_from([*ALGORITHMS]), st.sampled_from([1, 8, 64, 512]), st.integers(1, 2**28))
def test_times_are_positive_and_shrink_with_bandwidth(name, ranks, size):
    topology = Topology.of(ranks, min(ranks, 8))
    seconds = PCIE.seconds(Rule(name), size, topology)
    assert (seconds > 0) == (ranks > 1)
    narrow = replace(PCIE, intra_gbytes=60.0, inter_gbytes=12.5)
    assert narrow.seconds(Rule(name), size, topology) >= seconds


def test_phases_in_nodes_and_a_torus_whose_rows_are_nodes_agree():
    rows = Rule("torus", shape=(8, 256))
    assert V100.seconds(rows, SIZE, MANY) == V100.seconds(Rule("hierarchical"), SIZE, MANY)
    for shape, by_hand in (
        # Rows of 32 ranks span four nodes; each of 8 columns has an eighth of a node's network.
        ((32, 64), 2 * 31 / 32 / 25e9 + 2 * 63 / 64 / 32 / (25e9 / 8)),
        # Rows of 4 ranks are half a node; each of 4 columns has a quarter of a node's network.
        ((4, 512), 2 * 3 / 4 / 120e9 + 2 * 511 / 512 / 4 / (25e9 / 4)),
    ):
        less, more = (V100.seconds(Rule("torus", shape=shape), 2**n, MANY) for n in (33, 34))
        assert more - less == pytest.approx(2**33 * by_hand)


def test_half_precision_is_half_the_message_and_sums_in_fp32_are_not_predicted():
    half = V100.seconds(Rule("ring", wire_dtype="fp16"), SIZE, MANY)
    assert half == V100.seconds(Rule("ring"), SIZE // 2, MANY)
    rule = Rule("hierarchical", wire_dtype="fp16", sum_dtype="fp32")
    with pytest.raises(PlanError, match=r"^sum_dtype: NCCL's model .* fp32; valid: null, or links"):
        V100.seconds(rule, SIZE, MANY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inter_gbytes": 0.0}, "inter_gbytes: 0.0; valid: above 0, finite"),
        ({"tree_gbytes": (110.0, 0.0)}, r"tree_gbytes: \(110.0, 0.0\); valid: two numbers above 0"),
        ({"host_seconds": -1e-6}, "host_seconds: -1e-06; valid: 0 or more, finite"),
    ],
)
def test_impossible_links_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(V100, **change)
    with pytest.raises(ValueError, match="links: missing; valid: links, or nccl"):
        Cluster.of(8, 8)
