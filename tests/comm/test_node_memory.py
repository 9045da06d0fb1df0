"""Ranks of a node exchange data through memory without a name, which nothing is left of."""

import os
import signal
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from largebatch.comm import Rule, Topology, all_reduce, node_memory
from tests.comm import wire
from tests.comm.failure.started import started, until
from tests.ranks import run_ranks

four = pytest.mark.slow("runs four ranks")

LEADER = Rule("leader", chunk_bytes=100_000)
ELEMENTS = 10**6  # 4 MB


def layout(nodes, **options):
    return Topology(nodes, dist.get_rank(), **options)


RULES = [LEADER, Rule("leader"), Rule("hierarchical", chunk_bytes=100_000), Rule("torus")]


def on_four_ranks():
    nodes = ((0, 1), (2, 3))
    for rule in RULES:
        intra, inter, _ = wire.sent_by(rule, layout(nodes), ELEMENTS)
        assert intra < 100_000
        assert inter == pytest.approx(2 * 4e6, rel=0.05)  # each node sends and receives 4 MB
    declined = wire.sent_by(LEADER, layout(nodes, shared_memory=False), ELEMENTS)
    elsewhere = mock.patch.object(node_memory, "_opened", return_value=None)
    with elsewhere if dist.get_rank() == 3 else nullcontext():  # as if it ran on another machine
        apart = wire.sent_by(LEADER, layout(nodes), ELEMENTS)
    assert min(declined[0], apart[0]) > 10**7
    for each in (nodes, ((0, 1, 2), (3,))):
        mixed_sizes(each)
    dist.barrier()  # else a fast rank could exit while others still connect


@four
def test_only_signals_and_what_crosses_between_nodes_are_sent_as_messages():
    """Unless memory is declined, or ranks of one node are on different machines."""
    run_ranks(4, on_four_ranks)


def mixed_sizes(nodes):
    """Sum messages of changing sizes and dtypes, whose shares and windows differ each time."""
    topology, rank = layout(nodes), dist.get_rank()
    plain = replace(topology, shared_memory=False)
    generator = torch.Generator().manual_seed(rank)
    equal = len({len(ranks) for ranks in nodes}) == 1
    for step in range(30):
        size = int(torch.randint(1, 60_000, (), generator=torch.Generator().manual_seed(step)))
        name = ("leader", "hierarchical")[step % 2] if equal else "leader"
        dtype = (torch.float32, torch.float64, torch.bfloat16)[step % 3]
        wire_dtype = "fp16" if step % 5 == 0 else None
        # Integers whose sums are exact in every dtype, in any order.
        tensor = torch.randint(-8, 8, (size,), generator=generator).to(dtype)
        expected = tensor.clone()
        all_reduce(expected, plain, Rule("ring"))
        all_reduce(tensor, topology, Rule(name, wire_dtype=wire_dtype, chunk_bytes=40_000))
        assert torch.equal(tensor, expected), (step, size, name, dtype)


def sum_until_killed(rank, folder, doomed):
    topology = Topology.of(3, 3, rank)
    tensor = torch.ones(10**6)
    try:
        for step in range(10**6):
            all_reduce(tensor, topology, LEADER)
            if step == 3:
                (folder / f"running-{rank}").touch()
                if rank == doomed:
                    os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError:
        (folder / f"noticed-{rank}").touch()
        os._exit(3)


@four
def test_nothing_is_left_of_a_job_whose_ranks_are_killed(tmp_path):
    def have_ended():
        for process in ranks:
            with suppress(OSError):  # it has ended
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                assert "/dev/shm/" not in maps, "memory has a name, which could outlive the job"
        return not any(process.is_alive() for process in ranks)

    with started(3, sum_until_killed, tmp_path, 1) as ranks:
        until(have_ended, 120)
    # The ranks that were not killed have noticed by a failed collective, and not by a wrong sum.
    assert [process.exitcode for process in ranks] == [3, -signal.SIGKILL, 3]
    assert {path.name for path in tmp_path.glob("noticed-*")} == {"noticed-0", "noticed-2"}


def test_only_the_file_that_was_made_for_it_is_opened(tmp_path):
    """The rank may be on another machine, where the process is another one, or none."""
    token, me, before = b"a token", os.getpid(), len(os.listdir("/proc/self/fd"))
    with open(node_memory._new_file(), "wb+") as shared, open(tmp_path / "other", "wb+") as other:
        for file in (shared, other):
            file.write(token)
            file.flush()
        opened = node_memory._opened(me, shared.fileno(), token)
        assert os.path.sameopenfile(shared.fileno(), opened)
        os.close(opened)
        assert node_memory._opened(me, other.fileno(), token) is None
        assert node_memory._opened(me, shared.fileno(), b"another") is None
        assert node_memory._opened(2**22 + 1, shared.fileno(), token) is None
    assert len(os.listdir("/proc/self/fd")) == before
