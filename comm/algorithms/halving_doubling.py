"""Rabenseifner's all-reduce: recursive halving and doubling with point-to-point messages."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..collectives import exchange
from ..topology import Topology
from ..traffic import Tally, Traffic
from .base import Algorithm


class HalvingDoubling(Algorithm):
    """Reduce-scatter by recursive halving, all-gather by recursive doubling (Rabenseifner 2004).

    It takes 2 log2 p messages instead of a ring's 2(p - 1), and sends the same number of bytes,
    2(p - 1)/p of the data. The largest halves are exchanged between neighbours on the same node:
    if the number of nodes and the number of ranks per node are powers of two, no more bytes cross
    between nodes than in the hierarchical algorithm. If p is not a power of two, each surplus rank
    first sends its data to a neighbour, which adds it, and receives the result from it at the end:
    2 further messages with all of the data (the scheme of Thakur, Rabenseifner and Gropp 2005).

    Half precision is rounded at each of the ceil(log2 p) additions per element.
    """

    name = "halving-doubling"

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        group = topology.groups.world
        if group is None:
            return
        position = topology.order.index(topology.rank)
        in_group = {rank: number for number, rank in enumerate(sorted(topology.order))}
        order = [in_group[rank] for rank in topology.order]  # as the group numbers its ranks
        active, folded = _fold(len(order))
        pairs = dict(folded)  # surplus position -> its proxy
        if position in pairs:
            partner = order[pairs[position]]
            exchange([(partner, tensor)], [], group).wait()
            exchange([], [(partner, tensor)], group).wait()
            return
        proxied = [order[extra] for extra, proxy in folded if proxy == position]
        received = tensor.new_empty(tensor.numel() if proxied else (tensor.numel() + 1) // 2)
        for extra in proxied:
            exchange([], [(extra, received)], group).wait()
            tensor.add_(received)

        me = active.index(position)
        mine = tensor
        done: list[tuple[int, Tensor, Tensor]] = []  # partner, this rank's half, the partner's half
        for bit in range(len(active).bit_length() - 1):
            partner = order[active[me ^ (1 << bit)]]
            lower, upper = mine.tensor_split(2)
            mine, theirs = (upper, lower) if me >> bit & 1 else (lower, upper)
            part = received[: mine.numel()]
            exchange([(partner, theirs)], [(partner, part)], group).wait()
            mine.add_(part)
            done.append((partner, mine, theirs))
        for partner, ours, theirs in reversed(done):
            exchange([(partner, ours)], [(partner, theirs)], group).wait()
        for extra in proxied:
            exchange([(extra, tensor)], [], group).wait()

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        order = np.array(topology.order)
        active, folded = _fold(len(order))
        tally = Tally(topology)
        if folded:
            extras, proxies = order[np.array(folded)].T
            tally.step(extras, proxies, size_bytes)
            tally.step(proxies, extras, size_bytes)
        ranks = order[np.array(active)]
        for bit in range(len(active).bit_length() - 1):
            partners = ranks[np.arange(len(active)) ^ (1 << bit)]
            tally.step(ranks, partners, size_bytes / 2 ** (bit + 1), times=2)
        return tally.traffic()


def _fold(p: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the active positions among ``p``, a power of two, and (surplus, proxy) pairs."""
    extra = p - (1 << (p.bit_length() - 1))
    pairs = [(2 * i, 2 * i + 1) for i in range(extra)]
    return [proxy for _, proxy in pairs] + list(range(2 * extra, p)), pairs
