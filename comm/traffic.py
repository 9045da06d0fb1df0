"""Messages and bytes of an all-reduce by link level: the terms of every algorithm's cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .topology import Topology


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes of one all-reduce, by link level.

    The first four fields describe the critical path: a rank sends and receives one message at a
    time (the single-port model of Thakur, Rabenseifner and Gropp 2005), steps run one after
    another, and each step counts the busiest rank or node.

    The totals matter where ranks share the medium that carries their messages, and can be checked
    by counting bytes.
    """

    intra_messages: int  #: Number of sequential transfers inside a node.
    intra_bytes: float  #: That one rank sends to, or receives from, ranks of its own node.
    inter_messages: int  #: Number of sequential transfers between nodes.
    inter_bytes: float  #: That leave, or enter, one node.
    total_intra_bytes: float = 0.0  #: That all ranks together send inside nodes.
    total_inter_bytes: float = 0.0  #: That all ranks together send to other nodes.
    concurrent: bool = False  #: Whether both levels carry bytes in every step.


class Tally:
    """Sums the traffic of an algorithm step by step, where no formula covers all layouts."""

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
        """Count steps in which ``senders[i]`` sends ``size_bytes[i]`` to ``receivers[i]``."""
        # ``inter_messages`` of these pass a chunk from node to node: all, if any message crosses.
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
        """Count simultaneous rings in groups of equal size, with two passes for an all-reduce."""
        # Each pass has p - 1 transfers; in a group that spans k nodes, a chunk crosses between
        # nodes in k - 1 of them, as in NCCL's tuning model.
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
        """Count simultaneous all-to-alls of ``size_bytes`` in groups of equal size."""
        table = np.array(groups)
        for shift in range(1, table.shape[1]):
            self.step(
                table.ravel(), np.roll(table, shift, axis=1).ravel(), size_bytes / len(table[0])
            )

    def traffic(self) -> Traffic:
        """Return the traffic of all steps counted so far."""
        return Traffic(
            intra_messages=self._messages[0],
            intra_bytes=self._bytes[0],
            inter_messages=self._messages[1],
            inter_bytes=self._bytes[1],
            total_intra_bytes=self._totals[0],
            total_inter_bytes=self._totals[1],
            concurrent=bool(self._concurrent),
        )
