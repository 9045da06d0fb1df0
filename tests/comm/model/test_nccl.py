"""NCCL's model, against values computed by hand from the constants of its source."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.comm import ALGORITHMS, Cluster, Nccl, PlanError, Rule, Topology

#: V100 with two EDR per node at line rate.
V100 = Nccl(120.0, 25.0, nics=2)
SIZE = 25 * 2**20
MANY = Topology.of(2048, 8)


def test_25_mib_on_2048_v100_take_3_3_ms_by_tree_and_ll128():
    ways = V100.all_reduces(SIZE, 2048, 256)
    latency = 4.4 + 2 * (7 * 1.2 + 8 * 8.5)  # microseconds: base, 7 in the node, log2(256) between
    bandwidth = 0.5 * min(0.9 * 25, 80) * 0.915 * 0.8  # GB/s; NCCL takes 0.8 at 16 MiB
    assert ways["tree", "LL128"] == pytest.approx(latency * 1e-6 + SIZE / (bandwidth * 1e9))
    assert min(ways, key=lambda way: ways[way]) == ("tree", "LL128")


@pytest.mark.parametrize(
    ("protocol", "latency", "share"),
    [
        ("LL", 3.6 + 14 * 0.47, 0.25),
        ("LL128", 10.0 + 14 * 1.9, 0.92),
        ("Simple", 8.4 + 14 * 3.4, 1.0),
    ],
)
def test_rings_on_one_node(protocol, latency, share):
    found = V100.all_reduces(2**20, 8, 1)["ring", protocol]
    assert found == pytest.approx(latency * 1e-6 + 2 * 7 / 8 * 2**20 / (share * 120e9))


def test_rings_between_nodes_have_more_latency_by_ll_and_for_large_messages():
    ways = V100.all_reduces(1024, 32, 4)
    assert ways["ring", "LL"] == pytest.approx(
        1e-6 * (3.6 + 2 * 28 * 0.47 * 1.8 + 2 * 3 * 2.7) + 2 * 31 / 32 * 1024 / (0.25 * 25e9)
    )
    few, many = (V100.all_reduces(size, 32, 4)["ring", "Simple"] for size in (131071, 131072))
    simple = 1e-6 * (8.4 + 2 * 28 * 3.4 + 2 * 3 * 9.6)
    assert many - few == pytest.approx(0.9 * simple, rel=1e-3)


def test_trees_are_limited_and_ll128_needs_nvlink():
    wide = Nccl(400.0, 400.0)
    found = wide.all_reduces(2**30, 64, 8)["tree", "Simple"]
    assert found == pytest.approx(1e-6 * 2 * (7 * 28 + 3 * 50) + 2 * 2**30 / 80e9)
    pcie = replace(V100, nvlink=False).all_reduces(2**20, 64, 8)
    assert {protocol for _, protocol in pcie} == {"LL", "Simple"}
    assert pcie["ring", "LL"] == pytest.approx(
        1e-6 * (3.6 + 2 * 56 * 1.0 * 1.8 + 2 * 7 * 2.7) + 2 * 63 / 64 * 2**20 / (0.25 * 25e9)
    )


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


@given(
    st.sampled_from(sorted(ALGORITHMS)),
    st.sampled_from([1, 8, 64, 512]),
    st.integers(1, 2**28),
    st.booleans(),
)
def test_times_are_positive_and_shrink_with_bandwidth(name, ranks, size, nvlink):
    topology = Topology.of(ranks, min(ranks, 8))
    nccl = replace(V100, nvlink=nvlink)
    seconds = nccl.seconds(Rule(name), size, topology)
    assert (seconds > 0) == (ranks > 1)
    narrow = replace(nccl, intra_gbytes=60.0, inter_gbytes=12.5)
    assert narrow.seconds(Rule(name), size, topology) >= seconds


def test_phases_in_nodes_and_a_torus_whose_rows_are_nodes_agree():
    rows = Rule("torus", shape=(8, 256))
    assert V100.seconds(rows, SIZE, MANY) == V100.seconds(Rule("hierarchical"), SIZE, MANY)
    # Rows of 32 ranks span four nodes; each of 8 columns has an eighth of a node's network.
    wide = Rule("torus", shape=(32, 64))
    longer = V100.seconds(wide, 2**34, MANY) - V100.seconds(wide, 2**33, MANY)
    by_hand = 2 * 31 / 32 / 25e9 + 2 * 63 / 64 / 32 / (25e9 / 8)
    assert longer == pytest.approx(2**33 * by_hand)
    # Rows of 4 ranks are half a node; each of 4 columns has a quarter of a node's network.
    narrow = Rule("torus", shape=(4, 512))
    longer = V100.seconds(narrow, 2**34, MANY) - V100.seconds(narrow, 2**33, MANY)
    by_hand = 2 * 3 / 4 / 120e9 + 2 * 511 / 512 / 4 / (25e9 / 4)
    assert longer == pytest.approx(2**33 * by_hand)


def test_sums_in_a_dtype_of_their_own_are_not_predicted_as_if_nccl_did_them():
    rule = Rule("hierarchical", wire_dtype="fp16", sum_dtype="fp32")
    with pytest.raises(PlanError, match=r"^sum_dtype: NCCL's model .* fp32; valid: null, or links"):
        V100.seconds(rule, SIZE, MANY)


def test_half_precision_on_the_wire_is_half_the_message():
    half = V100.seconds(Rule("ring", wire_dtype="fp16"), SIZE, MANY)
    assert half == V100.seconds(Rule("ring"), SIZE // 2, MANY)


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
