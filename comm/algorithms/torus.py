"""Two-level all-reduce: reduce-scatter in rows, all-reduce in columns, all-gather in rows.

The rows are nodes (hierarchical) or the rows of any X × Y grid (torus).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from .. import collectives
from ..collectives import Pending
from ..topology import Topology
from ..traffic import Tally, Traffic
from .base import Phased


@dataclass(frozen=True, kw_only=True)
class TwoLevel(Phased):
    """What the hierarchical all-reduce and the torus share."""

    # Half precision is summed in FP32 on any back end, and only what is sent is rounded: the sum
    # over the row, and that over the column, which is an all-to-all, a local sum and an all-gather.
    fp32_sums: bool = False
    mean: bool = False  # divide each such sum before it is rounded, so that none can overflow

    def _shape(self, topology: Topology) -> tuple[int, int]:
        return topology.ranks_per_node, len(topology.nodes)

    def check(self, topology: Topology) -> None:
        _ = topology.ranks_per_node  # raises if nodes differ in size

    def shares(self, elements: int, topology: Topology) -> tuple[int, ...] | None:
        shape = self._shape(topology)
        if self.fp32_sums or topology.rows(shape) != topology.nodes:
            return None  # through messages alone
        length, longer = divmod(elements, shape[0])
        return tuple(length + (rank < longer) for rank in range(shape[0]))

    def phases(self, tensor: Tensor, topology: Topology) -> Iterator[Pending]:
        shape = self._shape(topology)
        grid = topology.grid(shape)
        row, column = grid.row, grid.column
        padding = -tensor.numel() % (shape[0] * shape[1] if self.fp32_sums else shape[0])
        padded = F.pad(tensor, (0, padding)) if padding else tensor
        if self.fp32_sums:
            # Both operations hold memory that must be kept to the end: see Phased.
            share, in_row = collectives.reduce_scatter_in_fp32(padded, row, mean=self.mean)
            yield in_row
            _, in_column = collectives.reduce_scatter_in_fp32(share, column, mean=self.mean)
            yield in_column
            yield collectives.all_gather(share, column)
        else:
            share, in_row = collectives.reduce_scatter(padded, row)
            yield in_row
            yield collectives.all_reduce(share, column)
        yield collectives.all_gather(padded, row)
        if padding:
            tensor.copy_(padded[: tensor.numel()])

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        rows = topology.rows(self._shape(topology))
        tally = Tally(topology)
        columns, share = list(zip(*rows, strict=True)), size_bytes / len(rows[0])
        tally.all_to_alls(rows, size_bytes)
        if self.fp32_sums:
            tally.all_to_alls(columns, share)
            tally.rings(columns, share, passes=1)
        else:
            tally.rings(columns, share)
        tally.rings(rows, size_bytes, passes=1)
        return tally.traffic()


class Hierarchical(TwoLevel):
    """Reduce-scatter in the node, all-reduce across nodes by all local ranks, all-gather.

    This is Horovod's hierarchical all-reduce: each of a node's L ranks carries 1/L of the data
    across nodes, all in parallel, so a node sends 2(N - 1)/N of the data, the minimum for an
    all-reduce. It needs the same number of ranks on each node: with shares of different sizes, the
    ranks that communicate across nodes would not hold the same part of the data.

    Half precision is rounded once after the sum in the node (on NCCL as ``ncclReduceScatter``
    does), and at each addition across nodes; with ``fp32_sums`` once after each of the two.
    """

    name = "hierarchical"


@dataclass(frozen=True)
class Torus(TwoLevel):
    """The same phases along the rows and columns of any grid: a 2-D torus (Mikami et al. 2018).

    Ranks fill rows of X in node order; the i-th ranks of all rows form a column of Y. It takes
    2(X - 1) + 2(Y - 1) messages, in which each rank sends 2(X - 1)/X + 2(Y - 1)/(XY) of the data.
    With nodes as rows, the default, it is the hierarchical all-reduce; with ``fp32_sums`` and a
    single row of all ranks, it rounds half precision only once.

    Attributes:
        shape: (X, Y) with X · Y ranks; None makes each node a row.
    """

    shape: tuple[int, int] | None = None
    name = "torus"

    def _shape(self, topology: Topology) -> tuple[int, int]:
        return self.shape or super()._shape(topology)

    def check(self, topology: Topology) -> None:
        topology.rows(self.shape) if self.shape else super().check(topology)
