"""Count the bytes between ranks by the kernel's counters of gloo's TCP connections."""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter

import torch
import torch.distributed as dist

from largebatch.comm import Rule, Topology, all_reduce

# tcpi_bytes_received in Linux's struct tcp_info: bytes of payload.
_RECEIVED = 128


def _connections() -> dict[tuple[int, int], int]:
    """Bytes that this process has received on each connection, by (own port, peer's port)."""
    counted = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                ends = one.getsockname()[1], one.getpeername()[1]
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except (OSError, IndexError):
            continue  # a file that was closed meanwhile, or an unconnected socket
        counted[ends] = struct.unpack_from("Q", info, _RECEIVED)[0]
    return counted


def sent_by(rule: Rule, topology: Topology, elements: int) -> tuple[int, int, int]:
    """Bytes that an all-reduce of ones sends inside nodes, between them, and on the busiest link.

    A link is what leaves a node, or enters it. Every rank must call it.
    """
    tensor = torch.ones(elements)
    all_reduce(tensor, topology, rule)  # connects
    dist.barrier()
    before = _connections()
    dist.barrier()
    all_reduce(tensor, topology, rule)
    assert (tensor == topology.world_size**2).all()
    node = {rank: index for index, ranks in enumerate(topology.nodes) for rank in ranks}
    intra, links = 0, Counter[tuple[str, int]]()
    for (sender, receiver), size in _between_ranks(before).items():
        if node[sender] == node[receiver]:
            intra += size
        else:
            links["out", node[sender]] += size
            links["in", node[receiver]] += size
    dist.barrier()
    return intra, links.total() // 2, max(links.values(), default=0)


def _between_ranks(before: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """Bytes received since ``before``, by (sender, receiver), the same on all ranks.

    Every rank calls it when it has received its messages. The messages of this function itself are
    not counted.
    """
    now = _connections()
    mine = {ends: now[ends] - before.get(ends, 0) for ends in now}
    everyone: list[dict[tuple[int, int], int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    # The two ends of a connection list its ports in opposite order.
    owner = {ends: rank for rank, counted in enumerate(everyone) for ends in counted}
    counts: dict[tuple[int, int], int] = {}
    for receiver, counted in enumerate(everyone):
        for (own, peer), size in counted.items():
            sender = owner.get((peer, own))
            if size and sender is not None and sender != receiver:
                counts[sender, receiver] = counts.get((sender, receiver), 0) + size
    return counts
