"""Every algorithm sums correctly for any number of ranks and elements, and sends what it states."""

import hashlib
from dataclasses import astuple, replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from largebatch.comm import ALGORITHMS, Rule, Topology, TopologyError, Torus, all_reduce
from tests.comm import wire
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow("runs every algorithm on up to eight ranks")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALVES = {"fp16": FP16, "bf16": BF16}
# Every dtype with a message of several chunks that needs padding.
MESSAGES = [(1, FP32), (3, FP16), (64, BF16), (30_011, FP32), (30_011, FP16), (30_011, BF16)]
PHASED = ("hierarchical", "leader", "torus")
TWO_LEVEL = ("hierarchical", "torus")


def values(rank, size, dtype):
    generator = torch.Generator().manual_seed(1000 * size + rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def rules_for(topology):
    """Every algorithm that supports the layout, in every shape, whole and in chunks."""
    p = topology.world_size
    shapes = [(x, p // x) for x in range(1, p + 1) if p % x == 0]
    rules = [Rule(name) for name in ALGORITHMS] + [Rule("torus", shape=s) for s in shapes]
    rules += [Rule(name, chunk_bytes=size) for name in PHASED for size in (1, 50_000)]
    rules += [Rule("torus", shape=s, chunk_bytes=30_000) for s in shapes]
    rules += [replace(rule, sum_dtype="fp32") for rule in rules if rule.algorithm in TWO_LEVEL]
    return [rule for rule in rules if works(rule.implementation, topology)]


def works(algorithm, topology):
    try:
        algorithm.check(topology)
    except TopologyError:
        return False
    return True


def errors(nodes, shared_memory):
    """The largest error of each algorithm and dtype, in roundings; and digests of all sums."""
    topology = Topology(nodes, dist.get_rank(), shared_memory=shared_memory)
    p = dist.get_world_size()
    rules, worst, bits = rules_for(topology), {}, {}
    for size, dtype in MESSAGES:
        terms = torch.stack([values(rank, size, dtype).double() for rank in range(p)])
        # Each of p - 1 additions may round by eps / 2 of a partial sum.
        unit, total = torch.finfo(dtype).eps * terms.abs().sum(0), terms.sum(0)
        for rule in rules:
            if shared_memory and rule.algorithm not in PHASED:
                continue  # does not use it
            if rule.chunk_bytes == 1 and size > 100:
                continue  # thousands of chunks of p elements
            tensor = terms[dist.get_rank()].to(dtype)
            all_reduce(tensor, topology, rule)
            error = ((tensor.double() - total).abs() / unit).max().item()
            worst[rule, dtype] = max(worst.get((rule, dtype), 0.0), error)
            bits[rule, dtype, size] = hashlib.blake2b(tensor.view(torch.uint8).numpy()).digest()
    return worst, bits


EQUAL = [(1, 1), (2, 1), (3, 3), (4, 2), (6, 2)]
UNEQUAL = [((0, 1, 2), (3, 4)), ((0, 2), (1,))]
LAYOUTS = [Topology.of(*sizes).nodes for sizes in EQUAL] + UNEQUAL


def ranks_of(nodes):
    return sum(len(ranks) for ranks in nodes)


COUNTED = 120 * 7168  # elements, 3.4 MB; any number of ranks up to 6 divides it


def counted(nodes):
    """What each rule sends, in whole messages and in chunks."""
    topology = Topology(nodes, dist.get_rank(), shared_memory=False)
    rules = [rule for rule in rules_for(topology) if rule.chunk_bytes is None]
    rules += [Rule("leader", chunk_bytes=1_000_000), Rule("ring", wire_dtype="fp16")]
    if len({len(ranks) for ranks in nodes}) == 1:
        rules.append(Rule("hierarchical", None, "fp16", 1_000_000, sum_dtype="fp32"))
    return {rule: wire.sent_by(rule, topology, COUNTED) for rule in rules}


def on_a_rank(layouts):
    if dist.get_world_size() == 4:
        check_large_sums(2, 20 * 10**6)
        check_half_precision()
    return {
        nodes: ([errors(nodes, shared) for shared in (True, False)], counted(nodes))
        for nodes in layouts
    }


@pytest.mark.parametrize("world_size", sorted({ranks_of(nodes) for nodes in LAYOUTS}))
def test_sums_are_exact_within_rounding_and_the_same_on_all_ranks_and_send_what_is_stated(
    world_size,
):
    """Four ranks also sum messages larger than shared memory, and in half precision."""
    layouts = [nodes for nodes in LAYOUTS if ranks_of(nodes) == world_size]
    ranks = run_ranks(world_size, on_a_rank, layouts)
    for nodes in layouts:
        for shared, *found in zip(
            (True, False), *(of_rank[nodes][0] for of_rank in ranks), strict=True
        ):
            for worst, bits in found:
                assert bits == found[0][1], nodes
                assert "leader" in {rule.algorithm for rule, _ in worst}
                assert shared or len({rule.algorithm for rule, _ in worst}) >= 4
                for rule, error in worst.items():
                    assert error <= (world_size - 1) / 2 + 1e-9, (nodes, rule)
        for rule, (intra, inter, busiest) in ranks[0][nodes][1].items():
            size_bytes = COUNTED * (2 if rule.wire_dtype else 4)
            stated = rule.implementation.traffic(size_bytes, Topology(nodes))
            # The surplus is headers and the messages that gather the counts.
            beside = 3_000 * world_size + 0.001 * (intra + inter)
            assert 0 <= intra - stated.total_intra_bytes < beside, rule
            assert 0 <= inter - stated.total_inter_bytes < beside, rule
            assert busiest <= stated.inter_bytes + beside, rule


def check_large_sums(ranks_per_node, size_bytes):
    """Check sums of small integers, which are exact."""
    topology = Topology.of(dist.get_world_size(), ranks_per_node, dist.get_rank())
    mine = torch.arange(size_bytes // 4 + 1, dtype=torch.float32).fmod_(16)
    expected = mine * sum(range(1, topology.world_size + 1))
    mine *= topology.rank + 1
    tensor = torch.empty_like(mine)
    for rule in [*map(Rule, ALGORITHMS), Rule("leader", chunk_bytes=2**22)]:
        all_reduce(tensor.copy_(mine), topology, rule)
        assert torch.equal(tensor, expected), rule


@pytest.mark.parametrize(
    ("algorithm", "nodes", "message"),
    [
        *(
            (ALGORITHMS[name], UNEQUAL[0], "^algorithm: nodes have 3, 2 ranks.*; valid: ring, lead")
            for name in TWO_LEVEL
        ),
        (
            Torus((4, 2)),
            ((0, 1, 2), (3, 4, 5)),
            "^shape: 6 ranks do not make a torus of 4 x 2; valid: 1 x 6, 2 x 3, 3 x 2, 6 x 1",
        ),
    ],
    ids=["hierarchical", "torus", "grid"],
)
def test_a_layout_that_an_algorithm_does_not_support_is_refused(algorithm, nodes, message):
    with pytest.raises(TopologyError, match=message):
        algorithm.check(Topology(nodes))


def check_half_precision():
    """Check that the sum is made in the wire dtype, with its rounding and its overflow."""
    topology = Topology.of(4, 2, dist.get_rank())
    for algorithm, (name, dtype) in product(ALGORITHMS, HALVES.items()):
        tensor = torch.full((1000,), 1 + 2.0**-12)
        all_reduce(tensor, topology, Rule(algorithm, wire_dtype=name))
        assert tensor.dtype == torch.float32
        assert (tensor == 4).all()  # neither dtype can represent 1 + 2^-12
        tensor = torch.full((1000,), 30000.0)
        all_reduce(tensor, topology, Rule(algorithm, wire_dtype=name))
        assert tensor.isinf().all() if dtype == FP16 else tensor.isfinite().all()


#: Algorithm, ranks, ranks per node; messages and bytes in a node and between nodes, of 1 byte.
FORMULAS = [
    ("ring", 8, 2, (8, 1.75, 6, 1.75)),  # 2 (p - 1) messages in all, and 2 (p - 1) / p
    ("hierarchical", 8, 2, (2, 1, 6, 1.5)),  # 2 (N - 1) / N between nodes, the minimum
    ("leader", 8, 4, (3 + 2, 5, 2, 1)),  # L - 1 and log2 L
    ("halving-doubling", 16, 4, (4, 1.5, 4, 1.5)),  # 2 log2 p; 2 (L - 1) / L and 2 (N - 1) / N
    # 2 floor(log2 p) + 2, and 2 (p' - 1) / p' + 2
    ("halving-doubling", 6, 6, (2 * 2 + 2, 2 * 3 / 4 + 2, 0, 0)),
    ("parameter-server", 8, 2, (2, 2, 12, 12)),
]


@pytest.mark.parametrize(("algorithm", "ranks", "per_node", "stated"), FORMULAS)
def test_stated_traffic_follows_the_published_formulas(algorithm, ranks, per_node, stated):
    traffic = ALGORITHMS[algorithm].traffic
    assert astuple(traffic(1, Topology.of(ranks, per_node)))[:4] == pytest.approx(stated)
    assert not any(astuple(traffic(1, Topology.of(1, 1))))


@given(
    local=st.integers(1, 9),
    nodes=st.integers(1, 9),
    x=st.integers(1, 9),
    y=st.integers(1, 9),
    size_bytes=st.integers(1, 10**9),
)
def test_traffic_of_any_layout_is_at_least_the_minimum(local, nodes, x, y, size_bytes):
    topology = Topology.of(local * nodes, local)
    p = local * nodes
    n = size_bytes
    # The torus whose rows are nodes is the hierarchical algorithm.
    torus = ALGORITHMS["torus"].traffic(n, topology)
    assert astuple(torus) == pytest.approx(astuple(ALGORITHMS["hierarchical"].traffic(n, topology)))
    # On any grid each rank sends 2 (X - 1) / X + 2 (Y - 1) / XY of the data.
    grid = Torus((x, y)).traffic(n, Topology.of(x * y, 1))
    assert grid.inter_bytes == pytest.approx((2 * (x - 1) / x + 2 * (y - 1) / (x * y)) * n)
    for algorithm in ALGORITHMS.values():
        stated = algorithm.traffic(n, topology)
        # These are the minima of any all-reduce, in total and out of a node.
        total = stated.total_intra_bytes + stated.total_inter_bytes
        assert total >= 2 * (p - 1) * n * (1 - 1e-9)
        assert stated.inter_bytes >= 2 * (nodes - 1) / nodes * n * (1 - 1e-9)
        assert (stated.inter_bytes > 0) == (stated.inter_messages > 0) == (nodes > 1)
