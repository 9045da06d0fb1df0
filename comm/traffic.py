"""What an all-reduce sends over each level of link: the common terms of every algorithm's cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .topology import Topology


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes of one all-reduce, by level of link.

    The first four are those on the critical path, where a rank sends one message and receives one
    at a time (the single-port model of Thakur, Rabenseifner and Gropp 2005). Steps follow one
    another; of a step, the busiest rank or node counts.

    Attributes:
        intra_messages: transfers inside a node that must follow one another.
        intra_bytes: bytes that one rank sends to, or gets from, ranks of its own node.
        inter_messages: transfers between nodes that must follow one another.
        inter_bytes: bytes that leave, or enter, one node.
        total_intra_bytes: bytes that all ranks together send inside nodes.
        total_inter_bytes: bytes that all ranks together send to other nodes.
        concurrent: whether both levels carry bytes in every step, rather than in turns.

    With a latency and a bandwidth per level the first four give the time of the latency-bandwidth
    model, ``messages * alpha + bytes * beta`` summed over levels. The totals matter where ranks
    share what carries their messages, and they are what can be counted.
    """

    intra_messages: int
    intra_bytes: float
    inter_messages: int
    inter_bytes: float
    total_intra_bytes: float = 0.0
    total_inter_bytes: float = 0.0
    concurrent: bool = False


class Tally:
    """Adds up the traffic of an algorithm step by step, where no formula covers all layouts."""

    def __init__(self, topology: Topology) -> None:
        self._node = np.empty(topology.world_size, dtype=np.int64)
        for index, ranks in enumerate(topology.nodes):
            self._node[list(ranks)] = index
        self._nodes = len(topology.nodes)
        self._messages = [0, 0]
        self._bytes = [0.0, 0.0]
        self._totals = [0.0, 0.0]
        self._concurrent: bool | None = None

    def step(
        self,
        senders: Sequence[int] | np.ndarray,
        receivers: Sequence[int] | np.ndarray,
        size_bytes: float | np.ndarray,
        *,
        times: int = 1,
        inter_messages: int | None = None,
    ) -> None:
        """Count a step in which rank ``senders[i]`` sends ``size_bytes[i]`` to ``receivers[i]``.

        Args:
            times: how often it is made.
            inter_messages: of these, how many a message that goes on from rank to rank spends
                between nodes; by default all, if any message crosses.
        """
        source, target = self._node[np.asarray(senders)], self._node[np.asarray(receivers)]
        sizes = np.broadcast_to(np.asarray(size_bytes, dtype=float), source.shape)
        crosses = source != target
        if inter_messages is None:
            inter_messages = times if crosses.any() else 0
        both = bool(crosses.any() and not crosses.all())
        self._concurrent = both and self._concurrent is not False
        self._messages[0] += times - inter_messages
        self._messages[1] += inter_messages
        self._bytes[0] += times * float(sizes[~crosses].max(initial=0.0))
        per_node = [
            np.bincount(ends[crosses], sizes[crosses], self._nodes) for ends in (source, target)
        ]
        self._bytes[1] += times * float(max(ends.max() for ends in per_node))
        self._totals[0] += times * float(sizes[~crosses].sum())
        self._totals[1] += times * float(sizes[crosses].sum())

    def rings(self, groups: Sequence[Sequence[int]], size_bytes: float, *, passes: int = 2) -> None:
        """Count rings of ``size_bytes`` in groups of equal size at the same time.

        Args:
            passes: 2 for an all-reduce, 1 for an all-gather, each of p - 1 transfers. A chunk
                crosses from node to node on k - 1 of them, where k nodes are in the group, as
                NCCL's tuning model counts.
        """
        p = len(groups[0])
        if p == 1:
            return
        nodes = max(len({int(self._node[rank]) for rank in group}) for group in groups)
        table = np.array(groups)
        self.step(
            table.ravel(),
            np.roll(table, -1, axis=1).ravel(),
            size_bytes / p,
            times=passes * (p - 1),
            inter_messages=passes * (nodes - 1),
        )

    def all_to_alls(self, groups: Sequence[Sequence[int]], size_bytes: float) -> None:
        """Count all-to-alls of ``size_bytes`` in groups of equal size at the same time."""
        table = np.array(groups)
        for shift in range(1, table.shape[1]):
            self.step(
                table.ravel(), np.roll(table, shift, axis=1).ravel(), size_bytes / len(table[0])
            )

    def traffic(self) -> Traffic:
        """The sum of all steps."""
        return Traffic(
            intra_messages=self._messages[0],
            intra_bytes=self._bytes[0],
            inter_messages=self._messages[1],
            inter_bytes=self._bytes[1],
            total_intra_bytes=self._totals[0],
            total_inter_bytes=self._totals[1],
            concurrent=bool(self._concurrent),
        )
