"""When a rank dies, the others fail soon and name it."""

import os
import signal
import time
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.comm import Plan, Topology, missing_ranks_named, register
from largebatch.comm.failure.roll_call import describe_missing_ranks
from tests.comm.failure.started import started
from tests.ranks import CONTEXT

TIMEOUT_SECONDS = 120


def train(rank, victim, sender):
    """Train until another rank is gone; send the error, its kind first, and when it came."""
    start, topology = time.monotonic(), Topology.of(4, 2, rank)
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(400, 400) for _ in range(6)))
    plan = Plan.single("hierarchical", fusion_threshold_bytes=700_000)
    model = DistributedDataParallel(network, **plan.ddp_options())
    register(model, plan, topology)
    try:
        with missing_ranks_named():
            assert [describe_missing_ranks() for _ in range(2)] == ["", ""]  # all at once
            for turn in range(1000):
                if turn == 3 and rank == victim:
                    network[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
                model(torch.ones(4, 400)).sum().backward()
    except RuntimeError as error:
        sender.send((rank, f"{type(error).__name__}: {error}", time.monotonic() - start))


@pytest.mark.slow("kills a rank and waits for the others to notice")
def test_a_killed_rank_is_named_by_all_others():
    receiver, sender = CONTEXT.Pipe(duplex=False)
    raised, victim = {}, 1
    reporting = started(4, train, victim, sender, timeout_seconds=TIMEOUT_SECONDS)
    with reporting, suppress(EOFError):  # all have ended
        sender.close()
        while receiver.poll(2 * TIMEOUT_SECONDS):
            rank, *raised[rank] = receiver.recv()
    assert sorted(raised) == [0, 2, 3]
    for rank, (message, seconds) in raised.items():
        start = f"CollectiveError: rank {rank}: hierarchical all-reduce of bucket "
        assert message.startswith(start)
        assert f"rank {victim} did not answer" in message
        assert message.count("did not answer") == 1
        assert seconds < TIMEOUT_SECONDS
