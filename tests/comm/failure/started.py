"""Ranks that a test ends, suspends or waits for, with a store that outlives them."""

import os
import time
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.ranks import CONTEXT


def until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def started(world_size, function, *args, timeout_seconds=60):
    """Start ``function(rank, *args)`` on each rank of a gloo group, and kill what is left of it."""
    store = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
    group = {"world_size": world_size, "timeout": timedelta(seconds=timeout_seconds)}
    ranks = [
        CONTEXT.Process(target=_rank, args=(rank, store.port, group, function, args))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _rank(rank, port, group, function, args):
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, group["world_size"], False)
    dist.init_process_group("gloo", store=store, rank=rank, **group)
    function(rank, *args)
