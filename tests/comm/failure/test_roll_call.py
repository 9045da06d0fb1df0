"""When a rank dies, the others fail soon and name it."""

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.comm import (
    CollectiveError,
    Plan,
    Rule,
    Topology,
    all_reduce,
    missing_ranks_named,
    register,
)
from largebatch.comm.failure.roll_call import describe_missing_ranks
from tests.comm.failure.started import started
from tests.ranks import CONTEXT

pytestmark = pytest.mark.slow("kills ranks and waits for the others to notice")

TIMEOUT_SECONDS = 40


def summing(victim, rule):
    topology = Topology.of(4, 2, dist.get_rank())
    with missing_ranks_named():
        tensor = torch.ones(2**20)
        for turn in range(1000):
            if turn == 3 and topology.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            all_reduce(tensor.fill_(1), topology, rule)


def training(victim, rule):
    topology = Topology.of(4, 2, dist.get_rank())
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(400, 400) for _ in range(6)))
    plan = Plan((rule,), fusion_threshold_bytes=700_000)
    model = DistributedDataParallel(network, **plan.ddp_options())
    register(model, plan, topology)
    with missing_ranks_named():
        for turn in range(1000):
            if turn == 3 and topology.rank == victim:
                network[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            model(torch.ones(4, 400)).sum().backward()


def messages(world_size, function, *args):
    """Return, by rank, the error and the seconds from the start of the function to it.

    An error that is a CollectiveError begins with ``CollectiveError: ``.
    """
    receiver, sender = CONTEXT.Pipe(duplex=False)
    reporting = started(
        world_size, _report, sender, function, args, timeout_seconds=TIMEOUT_SECONDS
    )
    raised = {}
    with reporting, suppress(EOFError):  # all have ended
        sender.close()
        while receiver.poll(2 * TIMEOUT_SECONDS):
            rank, *raised[rank] = receiver.recv()
    return raised


def _report(rank, sender, function, args):
    start = time.monotonic()
    try:
        function(*args)
    except RuntimeError as error:
        kind = "CollectiveError: " if isinstance(error, CollectiveError) else ""
        sender.send((rank, f"{kind}{error}", time.monotonic() - start))


@pytest.mark.parametrize(
    ("function", "victim", "rule", "what"),
    [
        (summing, 0, Rule("leader", chunk_bytes=2**18), ""),
        (training, 1, Rule("hierarchical"), "hierarchical all-reduce of bucket "),
    ],
)
def test_a_killed_rank_is_named_by_all_others(function, victim, rule, what):
    raised = messages(4, function, victim, rule)
    assert sorted(raised) == sorted({0, 1, 2, 3} - {victim})
    for rank, (message, seconds) in raised.items():
        assert message.startswith(f"CollectiveError: rank {rank}: {what}")
        assert f"rank {victim} did not answer" in message
        assert message.count("did not answer") == 1
        assert seconds < TIMEOUT_SECONDS


def asleep(seconds):
    """All call the roll at once, find nobody missing, and go on until rank 1 is late."""
    with missing_ranks_named():
        dist.barrier()
        assert [describe_missing_ranks() for _ in range(2)] == ["", ""]
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
        topology = Topology.of(2, 1, dist.get_rank())
        all_reduce(torch.ones(5), topology, Rule("ring"))
        if topology.rank == 1:
            time.sleep(seconds)
        all_reduce(torch.ones(5), topology, Rule("ring"))


def test_a_late_rank_is_not_reported_as_missing():
    message, _ = messages(2, asleep, 7)[0]
    assert not message.startswith("CollectiveError")
    assert "did not answer" not in message
    assert "imed out" in message
