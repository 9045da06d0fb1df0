"""Nodes are found without torchrun, and ranks that see different variables agree on them."""

import os
import socket

import pytest
import torch.distributed as dist

from largebatch.comm import Topology, TopologyError
from largebatch.comm.nodes import Place, find_nodes
from tests.ranks import run_ranks

GROUP, SLURM, LOCAL = "GROUP_RANK", "SLURM_NODEID", "OMPI_COMM_WORLD_LOCAL_RANK"
TWO_BY_TWO = ((0, 1), (2, 3))


def places(hosts, **variables):
    """The place of each rank, from a host name and the variables' values for each rank."""
    return [
        Place(host, {name: variables.get(name, [None] * 4)[i] for name in (GROUP, SLURM, LOCAL)})
        for i, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("hosts", "variables", "nodes", "source"),
    [
        pytest.param("aabb", {}, TWO_BY_TWO, "host names", id="mp.spawn"),
        pytest.param("abab", {}, ((0, 2), (1, 3)), "host names", id="ranks by turns"),
        pytest.param("aaaa", {GROUP: "0011"}, TWO_BY_TWO, GROUP, id="two agents on one machine"),
        pytest.param("aabb", {GROUP: "0011", SLURM: "0123"}, TWO_BY_TWO, GROUP, id="under srun"),
        pytest.param("aaaa", {SLURM: "0011"}, TWO_BY_TWO, SLURM, id="srun"),
        pytest.param("aabb", {SLURM: "0000"}, TWO_BY_TWO, "host names", id="inherited node"),
        pytest.param("aaaa", {LOCAL: "0101"}, TWO_BY_TWO, LOCAL, id="mpirun with one host name"),
        pytest.param(
            "abab", {LOCAL: "0011"}, ((0, 2), (1, 3)), "host names", id="mpirun --map-by node"
        ),
        pytest.param(
            "aaaa", {LOCAL: "0011"}, ((0, 1, 2, 3),), "host names", id="by node with one host name"
        ),
        pytest.param(
            "aaaa", {LOCAL: "0102"}, ((0, 1, 2, 3),), "host names", id="no run of local ranks"
        ),
        pytest.param("aaaa", {LOCAL: "1010"}, ((0, 1, 2, 3),), "host names", id="not from 0 on"),
        pytest.param("aaaa", {LOCAL: "0120"}, ((0, 1, 2), (3,)), LOCAL, id="unequal by mpirun"),
        pytest.param("aaab", {LOCAL: "0120"}, ((0, 1, 2), (3,)), "host names", id="unequal"),
        pytest.param(
            "aabb", {GROUP: ["0", None, "1", "1"]}, TWO_BY_TWO, "host names", id="on some ranks"
        ),
    ],
)
def test_nodes_are_found(hosts, variables, nodes, source):
    assert find_nodes(places(hosts, **variables)) == (nodes, source)


def test_a_process_knows_its_place(monkeypatch):
    for name, value in ((GROUP, "3"), (SLURM, ""), (LOCAL, None)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert Place() == Place(socket.gethostname(), {GROUP: "3", SLURM: None, LOCAL: None})


def layouts():
    """What ranks find that were started differently, and how it is logged."""
    rank = dist.get_rank()
    for name in (GROUP, SLURM, LOCAL):
        os.environ.pop(name, None)
    plain = Topology.from_environment()
    os.environ[SLURM] = str(rank)
    with_slurm = Topology.from_environment()
    if rank == 0:  # only this rank has it
        os.environ[GROUP] = "0"
        del os.environ[SLURM]
    disagreeing = Topology.from_environment()
    with pytest.raises(TopologyError, match=r"1 on rank 0, 2 on rank 1; valid: the same on all"):
        Topology.from_environment(rank + 1)
    with pytest.raises(TopologyError, match="None on rank 0, 2 on rank 1"):
        Topology.from_environment(2 if rank else None)
    found = [plain, with_slurm, disagreeing, Topology.from_environment(1)]
    return [(topology.nodes, topology.source) for topology in found]


@pytest.mark.slow("starts ranks")
def test_ranks_that_see_different_variables_agree():
    one, two = ((0, 1),), ((0,), (1,))
    expected = [
        (one, "host names"),
        (two, SLURM),
        (one, "host names"),
        (two, "ranks_per_node"),
    ]
    assert run_ranks(2, layouts) == [expected] * 2


def test_the_source_is_logged_once(caplog, monkeypatch):
    def gather(everyone, mine):
        everyone[:] = [mine, mine]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with caplog.at_level("INFO", "largebatch.comm.topology"):
            Topology.from_environment(1)
    assert caplog.messages == ["nodes of 1, 1 ranks, found by ranks_per_node"]
