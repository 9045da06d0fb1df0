"""The flat ring: the back end's own all-reduce over all ranks."""

from __future__ import annotations

from torch import Tensor

from .. import collectives
from ..topology import Topology
from ..traffic import Tally, Traffic
from .base import Algorithm


class Ring(Algorithm):
    """The back end's own all-reduce over all ranks, in rank order.

    Its traffic is modelled as a ring (Thakur, Rabenseifner and Gropp 2005): every rank makes
    2(p - 1) transfers of 1/p of the data, and a chunk crosses between nodes in 2(N - 1) of them
    for N nodes, as in NCCL's tuning model. gloo uses a ring; NCCL chooses between rings and trees.

    Half precision is rounded at each of the p - 1 additions.
    """

    name = "ring"

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        collectives.all_reduce(tensor, topology.groups.world).wait()

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        tally = Tally(topology)
        tally.rings([range(topology.world_size)], size_bytes)
        return tally.traffic()
