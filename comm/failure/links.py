"""Measure the link of each node, to find the one that slows an all-reduce down.

While gradients are reduced, a slow link makes all ranks wait alike, so that their waits do not tell
which it is. Here one rank of each node sends to that of the next node, all at the same time. Two
of these transfers cross the link of a node, that to it and that from it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..process_groups import device_of_messages

#: Bytes of a transfer, and number of transfers of which the fastest counts.
SIZE_BYTES, REPEATS = 2**20, 3

#: A node's link is slow if it has less than this share of the median of the others.
SLOW_SHARE = 0.5


def measure_links(nodes: Sequence[Sequence[int]]) -> list[float]:
    """Return the bytes per second that each node receives from the one before it; a collective.

    Every rank must call it, while no other collective runs. It takes milliseconds on fast links and
    about a second at 10 Mbit/s.

    Args:
        nodes: The global ranks on each node.

    Returns:
        One number for each node, the same on all ranks; empty for a single node.
    """
    if len(nodes) < 2:
        return []
    device = device_of_messages()
    seconds = torch.zeros(len(nodes), dtype=torch.float64, device=device)
    leaders = [node[0] for node in nodes]
    rank = dist.get_rank()
    here = leaders.index(rank) if rank in leaders else None
    sent, received = (torch.zeros(SIZE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    fastest = float("inf")
    for _ in range(1 + REPEATS):  # the first one connects
        dist.barrier()
        if here is None:
            continue
        start = time.perf_counter()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, leaders[(here + 1) % len(leaders)]),
                dist.P2POp(dist.irecv, received, leaders[here - 1]),
            ]
        )
        works[-1].wait()  # the receipt; on NCCL, which makes one work of the two, also the other
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
        for work in works[:-1]:  # gloo would wait for a second receipt
            work.wait()
    if here is not None:
        seconds[here] = fastest
    dist.all_reduce(seconds)
    return [SIZE_BYTES / took for took in seconds.tolist()]


def slow_link(rates: Sequence[float]) -> int | None:
    """Return the node whose link is slow, given what :func:`measure_links` returned.

    None if the links are alike, or there are fewer than three nodes: a link of two nodes has no
    other to compare it with.
    """
    if len(rates) < 3:
        return None
    # Each node by the better of the two transfers that cross its link.
    best = [max(rate, rates[(node + 1) % len(rates)]) for node, rate in enumerate(rates)]
    slowest = best.index(min(best))
    others = statistics.median(best[:slowest] + best[slowest + 1 :])
    return slowest if best[slowest] < SLOW_SHARE * others else None
