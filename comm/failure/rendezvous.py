"""A store for one attempt of a job, free of keys that an earlier attempt left behind.

torchrun's agents pass the same store to every attempt of a job: after a restart, gloo and NCCL read
the addresses of processes that have ended, and fail (github.com/pytorch/pytorch/issues/135712). The
restart count cannot serve as a prefix, because each agent counts on its own. Here rank 0 generates
a name for the attempt and passes it to every rank that presents an identifier of its own.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.02


def rendezvous(timeout: timedelta = timedelta(minutes=10)) -> dist.Store:
    """Return a store for this attempt of a torchrun job, to pass to ``init_process_group``.

    Every rank must call it; it returns when all ranks have.

    Raises:
        RuntimeError: not all ranks arrived within ``timeout``; rank 0's message names the missing
            ones.

    Example::

        dist.init_process_group(
            "nccl",
            device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])),
            store=rendezvous(),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
    """
    store: dist.Store
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store  # rank 0 has just created it
    return store_of_attempt(store, rank, world_size, timeout)


def store_of_attempt(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.Store:
    """Return ``store`` under a prefix that is new and identical on all ranks."""
    lobby = dist.PrefixStore("largebatch/attempt", store)
    me = uuid.uuid4().hex
    if rank > 0:
        lobby.set(f"hello/{rank}", me)
        lobby.wait([f"name/{me}"], timeout)
        name = lobby.get(f"name/{me}").decode()
        lobby.set(f"{name}/{rank}", "")
        return dist.PrefixStore(f"attempt/{name}", store)
    absent = set(range(1, world_size))
    end = time.monotonic() + timeout.total_seconds()
    while absent:
        if time.monotonic() > end:
            raise RuntimeError(f"ranks {sorted(absent)} did not arrive within {timeout}")
        for other in absent:
            # The identifier may still be that of an earlier attempt's process.
            if lobby.check([f"hello/{other}"]):
                lobby.set(f"name/{lobby.get(f'hello/{other}').decode()}", me)
        absent -= {other for other in absent if lobby.check([f"{me}/{other}"])}
        time.sleep(_POLL_SECONDS)
    return dist.PrefixStore(f"attempt/{me}", store)
