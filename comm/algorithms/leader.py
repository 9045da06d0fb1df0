"""The paper's hierarchical all-reduce: through one rank of each node."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from .. import collectives
from ..collectives import DONE, Pending
from ..topology import Topology
from ..traffic import Traffic
from .base import Phased


class Leader(Phased):
    """Reduce to the node's first rank, all-reduce among first ranks, broadcast (Jia et al. 2018).

    Nodes may differ in size. Between nodes it sends as few bytes as the hierarchical algorithm, in
    one message where that needs L for L ranks per node; inside a node, all data passes through the
    first rank. On gloo, where the ranks of a node share no memory, each rank sends its data to the
    first rank, which sums it (gloo's own reduce sends 1.5 times as much), and the result returns
    through a binomial tree: the first rank receives L - 1 and sends ceil(log2 L) messages of n
    bytes. The paper counts 2(k - 1) steps for each of the two phases in groups of k ranks.

    Half precision is rounded once after the sum in the node, and at each addition across nodes.
    """

    name = "leader"

    def phases(self, tensor: Tensor, topology: Topology) -> Iterator[Pending]:
        groups, leads = topology.groups, topology.local_rank == 0
        yield collectives.reduce(tensor, groups.intra)
        yield collectives.all_reduce(tensor, groups.inter) if leads else DONE
        yield collectives.broadcast(tensor, groups.intra)

    def shares(self, elements: int, topology: Topology) -> tuple[int, ...]:
        return elements, *(0 for _ in topology.nodes[topology.node][1:])

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        nodes = len(topology.nodes)
        local = max(len(ranks) for ranks in topology.nodes)
        inside = local - 1 + (local - 1).bit_length()  # the second term is ceil(log2 L)
        return Traffic(
            intra_messages=inside,
            intra_bytes=float(inside * size_bytes),
            inter_messages=2 * (nodes - 1),
            inter_bytes=2 * (nodes - 1) / nodes * size_bytes,
            total_intra_bytes=2.0 * (topology.world_size - nodes) * size_bytes,
            total_inter_bytes=2.0 * (nodes - 1) * size_bytes,
        )
