"""The layout of ranks on nodes, how it is found, and the process groups made from it."""

import os
from datetime import timedelta
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from largebatch.comm import ALGORITHMS, Plan, Rule, Topology, TopologyError, topology
from largebatch.comm.topology import find_nodes, group_of_rank
from tests.ranks import run_ranks

GROUP, SLURM, LOCAL = "GROUP_RANK", "SLURM_NODEID", "OMPI_COMM_WORLD_LOCAL_RANK"
TWO_BY_TWO, UNEQUAL = ((0, 1), (2, 3)), ((1, 3), (0,), (2,))


def test_consecutive_ranks_share_a_node_whose_size_divides_their_number():
    found = Topology.of(6, 2, rank=3)
    assert found.nodes == ((0, 1), (2, 3), (4, 5))
    assert (found.node, found.local_rank) == (1, 1)
    assert (found.world_size, found.ranks_per_node) == (6, 2)
    assert Topology.from_environment().nodes == ((0,),)  # without a process group
    with pytest.raises(TopologyError, match=r"^ranks_per_node: 6 ranks .* 4; valid: 1, 2, 3, 6"):
        Topology.of(6, 4)


@given(
    st.permutations(range(12)), st.sets(st.integers(1, 11)), st.sets(st.integers(0, 11), min_size=1)
)
def test_some_of_the_ranks_stay_on_their_nodes(order, cuts, chosen):
    ends = [0, *sorted(cuts), 12]
    nodes = [order[start:end] for start, end in pairwise(ends)]
    for rank in range(12):
        part = Topology(tuple(map(tuple, nodes)), rank).among(chosen)
        assert [set(node) for node in part.nodes] == [c for n in nodes if (c := chosen & {*n})]
        assert part.rank == (rank if rank in chosen else min(chosen))
        assert part.shared_memory == (len(chosen) == 12)


@pytest.mark.parametrize(
    ("hosts", "variables", "nodes", "source"),
    [
        pytest.param("aabb", {}, TWO_BY_TWO, "host names", id="mp.spawn"),
        pytest.param("aaaa", {GROUP: "0011"}, TWO_BY_TWO, GROUP, id="two agents on one machine"),
        pytest.param("aabb", {GROUP: "0011", SLURM: "0123"}, TWO_BY_TWO, GROUP, id="under srun"),
        pytest.param("aaaa", {SLURM: "0011"}, TWO_BY_TWO, SLURM, id="srun"),
        pytest.param("aabb", {SLURM: "0000"}, TWO_BY_TWO, "host names", id="inherited node"),
        pytest.param("aaaa", {LOCAL: "0101"}, TWO_BY_TWO, LOCAL, id="mpirun with one host name"),
        pytest.param("abab", {LOCAL: "0011"}, ((0, 2), (1, 3)), "host names", id="--map-by node"),
        pytest.param("aaaa", {LOCAL: "0011"}, ((0, 1, 2, 3),), "host names", id="one host name"),
        pytest.param("aaaa", {LOCAL: "0102"}, ((0, 1, 2, 3),), "host names", id="no run"),
        pytest.param("aaaa", {LOCAL: "0120"}, ((0, 1, 2), (3,)), LOCAL, id="unequal by mpirun"),
        pytest.param("aabb", {GROUP: ["0", None, "1", "1"]}, TWO_BY_TWO, "host names", id="some"),
    ],
)
def test_nodes_are_found(hosts, variables, nodes, source):
    places = [
        {"host names": host}
        | {name: variables.get(name, [None] * 4)[i] for name in (GROUP, SLURM, LOCAL)}
        for i, host in enumerate(hosts)
    ]
    assert find_nodes(places) == (nodes, source)


def layouts():
    """What ranks find that were started differently, and how it is logged."""
    rank = dist.get_rank()
    for name in (GROUP, SLURM, LOCAL):
        os.environ.pop(name, None)
    found = [Topology.from_environment()]
    os.environ[SLURM] = str(rank)
    found.append(Topology.from_environment())
    if rank == 0:  # only this rank has it
        os.environ[GROUP] = "0"
        del os.environ[SLURM]
    found += [Topology.from_environment(), Topology.from_environment(1)]
    with pytest.raises(TopologyError, match=r"1 on rank 0, 2 on rank 1; valid: the same on all"):
        Topology.from_environment(rank + 1)
    with pytest.raises(TopologyError, match="None on rank 0, 2 on rank 1"):
        Topology.from_environment(2 if rank else None)
    os.environ[GROUP] = str(rank)
    found.append(Topology.from_environment())
    return [(each.nodes, each.source) for each in found]


@pytest.mark.slow("starts ranks")
def test_ranks_that_see_different_variables_agree():
    one, two = ((0, 1),), ((0,), (1,))
    expected = [(one, "host names"), (two, SLURM), (one, "host names"), (two, "ranks_per_node")]
    assert run_ranks(2, layouts) == [[*expected, (two, GROUP)]] * 2


@pytest.fixture
def as_rank():
    """Return a function that makes a rank on torch's fake back end, in which no rank is another."""

    def make(rank, nodes):
        world_size = sum(map(len, nodes))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        if not dist.group.WORLD._get_backend(torch.device("cpu")).supports_splitting:
            pytest.skip("the fake back end of this torch does not split, as that of torch 2.11")
        return Topology(nodes, rank)

    yield make
    dist.destroy_process_group()


def ranks_of(group):
    return None if group is None else dist.get_process_group_ranks(group)


HIERARCHICAL = (Rule("hierarchical"),)
MANY, ONE, EACH = (Topology.of(*sizes).nodes for sizes in ((2048, 8), (8, 8), (8, 1)))


@pytest.mark.parametrize(
    ("rank", "nodes", "rules", "expected", "intra", "inter"),
    [
        (13, MANY, HIERARCHICAL, 2, [*range(8, 16)], [*range(5, 2048, 8)]),
        (0, UNEQUAL, (Rule("leader", max_bytes=9), Rule("ring")), 3, None, [0, 1, 2]),
        (2, TWO_BY_TWO, (Rule("torus", shape=(4, 1)),), 1, [2, 3], [0, 2]),
        (5, ONE, HIERARCHICAL, 1, [*range(8)], None),
        (5, EACH, HIERARCHICAL, 1, None, [*range(8)]),
    ],
    ids=["2,048 ranks", "two rules", "row", "one node", "nodes of one"],
)
def test_a_plan_takes_one_step_for_each_level_on_a_back_end_that_splits(
    as_rank, monkeypatch, rank, nodes, rules, expected, intra, inter
):
    found, plan = as_rank(rank, nodes), Plan(rules)
    split = mock.Mock(wraps=dist.split_group)
    monkeypatch.setattr(topology, "_splits", lambda: True)  # as NCCL that is bound to a device
    monkeypatch.setattr(dist, "split_group", split)
    monkeypatch.delattr(dist, "new_group")
    for _ in range(2):
        plan.connect(found)
    assert split.call_count == expected
    assert ranks_of(found.groups.intra) == intra
    assert ranks_of(found.groups.inter) == inter


PARTS = [[[3, 0], [1], [2]], [[2, 1, 0], [3]], [[3, 1]], [[2, 0]]]
SPLITS_GLOO = "Gloo" in str(dist.split_group.__doc__)  # since torch 2.15; before, NCCL only


def check_groups():
    rank = dist.get_rank()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), dist.group.WORLD)
    for nodes, unfit in ((TWO_BY_TWO, set()), (UNEQUAL, {"hierarchical", "torus"})):
        layout = Topology(nodes, rank)
        for name in sorted(ALGORITHMS.keys() - unfit):
            data = torch.arange(1.0, 8.0) * (1 + rank)
            ALGORITHMS[name].all_reduce(data, layout)
            assert data.tolist() == [10.0 * i for i in range(1, 8)], (name, nodes)
    layout = Topology(TWO_BY_TWO, rank)
    grid, own = layout.grid((4, 1)), layout.groups
    made = [own.intra, own.inter, own.world, grid.row]
    assert dist.group.WORLD not in made
    assert grid.column is None
    node, everyone = [*TWO_BY_TWO[rank // 2]], [0, 1, 2, 3]
    members = [ranks_of(group) for group in made]
    assert members == [node, [rank % 2, rank % 2 + 2], everyone, everyone]
    limits = {g._get_backend(torch.device("cpu")).options._timeout for g in made}
    assert limits == {timedelta(seconds=77)}
    for parts in PARTS:
        part = next((sorted(part) for part in parts if rank in part), [])
        assert ranks_of(group_of_rank(parts)) == (part if len(part) > 1 else None)


def check_both_ways():
    """Check groups that are made one by one, and those that are split off."""
    check_groups()
    if SPLITS_GLOO:
        topology._splits = lambda: True
        del dist.new_group
        check_groups()
    dist.barrier()  # else a fast rank could exit while others still connect


@pytest.mark.slow("starts four ranks")
def test_algorithms_sum_over_groups_that_have_the_timeout_of_the_default_group():
    run_ranks(4, check_both_ways)
