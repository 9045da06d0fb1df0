"""Two-level all-reduce: reduce-scatter in rows, all-reduce in columns, all-gather in rows.

The rows are nodes (hierarchical) or the rows of any X × Y grid (torus).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import collectives
from ..collectives import Pending
from ..topology import Topology
from ..traffic import Tally, Traffic
from .base import Phased


def _phases(
    tensor: Tensor, size: int, row: ProcessGroup | None, column: ProcessGroup | None
) -> Iterator[Pending]:
    padding = -tensor.numel() % size
    padded = F.pad(tensor, (0, padding)) if padding else tensor
    share, pending = collectives.reduce_scatter(padded, row)
    yield pending
    yield collectives.all_reduce(share, column)
    yield collectives.all_gather(padded, row)
    if padding:
        tensor.copy_(padded[: tensor.numel()])


def _equal_shares(elements: int, ranks: int) -> tuple[int, ...]:
    length, longer = divmod(elements, ranks)
    return tuple(length + (rank < longer) for rank in range(ranks))


class Hierarchical(Phased):
    """Reduce-scatter in the node, all-reduce across nodes by all local ranks, all-gather.

    This is Horovod's hierarchical all-reduce: each of a node's L ranks carries 1/L of the data
    across nodes, all in parallel, so a node sends 2(N - 1)/N of the data, the minimum for an
    all-reduce. It needs the same number of ranks on each node: with shares of different sizes, the
    ranks that communicate across nodes would not hold the same part of the data.

    Half precision is rounded once after the sum in the node, and at each addition across nodes.
    """

    name = "hierarchical"

    def check(self, topology: Topology) -> None:
        _ = topology.ranks_per_node  # raises if nodes differ in size

    def phases(self, tensor: Tensor, topology: Topology) -> Iterator[Pending]:
        groups = topology.groups
        return _phases(tensor, topology.ranks_per_node, groups.intra, groups.inter)

    def shares(self, elements: int, topology: Topology) -> tuple[int, ...]:
        return _equal_shares(elements, topology.ranks_per_node)

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        local, nodes = topology.ranks_per_node, len(topology.nodes)
        return Traffic(
            intra_messages=2 * (local - 1),
            intra_bytes=2 * (local - 1) / local * size_bytes,
            inter_messages=2 * (nodes - 1),
            inter_bytes=2 * (nodes - 1) / nodes * size_bytes,
            total_intra_bytes=2.0 * (local - 1) * nodes * size_bytes,
            total_inter_bytes=2.0 * (nodes - 1) * size_bytes,
        )


@dataclass(frozen=True)
class Torus(Phased):
    """The same phases along the rows and columns of any grid: a 2-D torus (Mikami et al. 2018).

    Ranks fill rows of X in node order; the i-th ranks of all rows form a column of Y. It takes
    2(X - 1) + 2(Y - 1) messages, in which each rank sends 2(X - 1)/X + 2(Y - 1)/(XY) of the data.
    With nodes as rows, the default, it is the hierarchical all-reduce.

    Attributes:
        shape: (X, Y) with X · Y ranks; None makes each node a row.
    """

    shape: tuple[int, int] | None = None
    name = "torus"

    def check(self, topology: Topology) -> None:
        if self.shape is None:
            _ = topology.ranks_per_node
        else:
            topology.rows(self.shape)

    def phases(self, tensor: Tensor, topology: Topology) -> Iterator[Pending]:
        grid = topology.grid(self._shape(topology))
        return _phases(tensor, self._shape(topology)[0], grid.row, grid.column)

    def shares(self, elements: int, topology: Topology) -> tuple[int, ...] | None:
        shape = self._shape(topology)
        if topology.rows(shape) != topology.nodes:
            return None
        return _equal_shares(elements, shape[0])

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        rows = topology.rows(self._shape(topology))
        tally = Tally(topology)
        tally.all_to_alls(rows, size_bytes)
        tally.rings(list(zip(*rows, strict=True)), size_bytes / len(rows[0]))
        tally.rings(rows, size_bytes, passes=1)
        return tally.traffic()

    def _shape(self, topology: Topology) -> tuple[int, int]:
        return self.shape or (topology.ranks_per_node, len(topology.nodes))
