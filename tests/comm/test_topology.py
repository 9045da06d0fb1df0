"""The layout of ranks on nodes, and the process groups made from it."""

from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from largebatch.comm import Topology, TopologyError
from tests.ranks import run_ranks


def test_consecutive_ranks_share_a_node():
    topology = Topology.of(6, 2, rank=3)
    assert topology.nodes == ((0, 1), (2, 3), (4, 5))
    assert (topology.node, topology.local_rank) == (1, 1)
    assert (topology.world_size, topology.ranks_per_node) == (6, 2)


def test_a_node_size_that_does_not_divide_the_ranks_is_refused():
    with pytest.raises(
        TopologyError,
        match=r"^ranks_per_node: 6 ranks cannot be split into nodes of 4; valid: 1, 2, 3, 6",
    ):
        Topology.of(6, 4)


def test_unequal_nodes_have_no_common_size():
    topology = Topology(((0, 1, 2), (3, 4)), rank=4)
    assert (topology.node, topology.local_rank, topology.world_size) == (1, 1, 5)
    with pytest.raises(TopologyError, match=r"^algorithm: nodes have 3, 2 ranks"):
        _ = topology.ranks_per_node


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


def members(ranks_per_node):
    groups = Topology.from_environment(ranks_per_node).groups
    assert dist.get_process_group_ranks(groups.world) == [0, 1, 2, 3]
    assert dist.group.WORLD not in (groups.world, groups.intra, groups.inter)
    found = [
        None if group is None else dist.get_process_group_ranks(group)
        for group in (groups.intra, groups.inter)
    ]
    dist.barrier()  # else a fast rank could exit while others still connect
    return found


@pytest.mark.parametrize(
    ("ranks_per_node", "expected"),
    [
        (2, [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]),
        (1, [[None, [0, 1, 2, 3]]] * 4),
        (4, [[[0, 1, 2, 3], None]] * 4),
        (None, [[[0, 1, 2, 3], None]] * 4),
    ],
)
def test_groups_inside_and_across_nodes(ranks_per_node, expected):
    assert run_ranks(4, members, ranks_per_node) == expected


def as_torchrun_has_it():
    import os

    # Two machines; torchrun numbers machines in GROUP_RANK and gives each consecutive ranks.
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 3)
    return Topology.from_environment().nodes


def test_the_machines_of_torchrun_are_nodes():
    assert run_ranks(5, as_torchrun_has_it) == [((0, 1, 2), (3, 4))] * 5


def test_without_a_process_group_there_is_one_rank():
    assert Topology.from_environment().nodes == ((0,),)


def timeouts(seconds):
    timeout = timedelta(seconds=seconds)
    groups = Topology.from_environment(1, timeout=timeout).groups
    found = groups.inter._get_backend(torch.device("cpu")).options._timeout
    dist.barrier()  # else a fast rank could exit while the other still connects
    return found


def test_groups_take_the_timeout():
    assert run_ranks(2, timeouts, 77) == [timedelta(seconds=77)] * 2
