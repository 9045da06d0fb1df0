"""A store without what an earlier attempt of the job left in it.

torchrun's agents hand the same store to every attempt, and since torch 2.5 nothing tells the keys
of one attempt from those of the next: after a restart, gloo and NCCL read addresses of processes
that have ended, and fail (github.com/pytorch/pytorch/issues/135712). The count of restarts is no
way out, as each agent keeps its own. Here rank 0 makes up a name for the attempt and hands it to
each rank that shows a name of its own, which no earlier process can have.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.02


def rendezvous(timeout: timedelta = timedelta(minutes=10)) -> dist.Store:
    """The store of this attempt of a job started by torchrun, for ``init_process_group``.

    Every rank must call it. It returns when all have.

    Raises:
        RuntimeError: not all ranks came within ``timeout``; rank 0's message names them.

    Example::

        dist.init_process_group(
            "nccl",
            store=rendezvous(),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
    """
    store: dist.Store
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store  # rank 0 made it just now
    return attempt(store, rank, world_size, timeout)


def attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """``store`` under a prefix that is new and the same on all ranks."""
    desk = dist.PrefixStore("largebatch/attempt", store)
    me = uuid.uuid4().hex
    if rank > 0:
        desk.set(f"hello/{rank}", me)
        desk.wait([f"name/{me}"], timeout)
        name = desk.get(f"name/{me}").decode()
        desk.set(f"{name}/{rank}", "")
        return dist.PrefixStore(f"attempt/{name}", store)
    absent = set(range(1, world_size))
    end = time.monotonic() + timeout.total_seconds()
    while absent:
        if time.monotonic() > end:
            raise RuntimeError(f"ranks {sorted(absent)} did not come within {timeout}")
        for other in absent:
            # A hello may be an earlier process's, until the rank of this attempt writes its own.
            if desk.check([f"hello/{other}"]):
                desk.set(f"name/{desk.get(f'hello/{other}').decode()}", me)
        absent -= {other for other in absent if desk.check([f"{me}/{other}"])}
        time.sleep(_POLL_SECONDS)
    return dist.PrefixStore(f"attempt/{me}", store)
