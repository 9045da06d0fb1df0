"""Rabenseifner's all-reduce: recursive halving, then recursive doubling, point to point."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..collectives import exchange
from ..topology import Topology
from ..traffic import Tally, Traffic


class HalvingDoubling:
    """Reduce-scatter by recursive halving, all-gather by recursive doubling (Rabenseifner 2004).

    2 log2 p messages in place of a ring's 2(p - 1), and as many bytes, 2(p - 1)/p of the data. The
    largest halves go between neighbours, which share a node, so that where nodes and ranks on
    them are powers of two, no more crosses between nodes than in the hierarchical form. Of p
    ranks that are not a power of two, as many as are too many first add their data to their
    neighbour's, and get the result from it in the end: 2 messages of all the data on top (the
    form of Thakur, Rabenseifner and Gropp 2005).

    Half precision is rounded at each of the ceil(log2 p) additions that an element goes through.
    """

    name = "halving-doubling"

    def check(self, topology: Topology) -> None:
        """Any layout will do."""

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        group = topology.groups.world
        if group is None:
            return
        order = topology.order
        taking, folded = _fold(len(order))
        position = order.index(topology.rank)
        pairs = dict(folded)  # who is too many -> who takes part for it
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

        me = taking.index(position)
        mine = tensor
        done: list[tuple[int, Tensor, Tensor]] = []  # partner, and what each of the two holds
        for bit in range(len(taking).bit_length() - 1):
            partner = order[taking[me ^ (1 << bit)]]
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
        taking, folded = _fold(len(order))
        tally = Tally(topology)
        if folded:
            extras, proxies = order[np.array(folded)].T
            tally.step(extras, proxies, size_bytes)
            tally.step(proxies, extras, size_bytes)
        ranks = order[np.array(taking)]
        for bit in range(len(taking).bit_length() - 1):
            partners = ranks[np.arange(len(taking)) ^ (1 << bit)]
            tally.step(ranks, partners, size_bytes / 2 ** (bit + 1), times=2)
        return tally.traffic()


def _fold(p: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Which of ``p`` positions take part, a power of two, and (who does not, who does for it)."""
    extra = p - (1 << (p.bit_length() - 1))
    pairs = [(2 * i, 2 * i + 1) for i in range(extra)]
    return [proxy for _, proxy in pairs] + list(range(2 * extra, p)), pairs
