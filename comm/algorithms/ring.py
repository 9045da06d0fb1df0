"""The flat ring: the back end's own all-reduce over all ranks."""

from __future__ import annotations

from torch import Tensor

from .. import collectives
from ..topology import Topology
from ..traffic import Tally, Traffic


class Ring:
    """The back end's own all-reduce over all ranks, in rank order.

    The cost is that of a ring (Thakur, Rabenseifner and Gropp 2005): 2(p - 1) transfers of 1/p of
    the data by every rank. A chunk crosses from one node to the next on 2(N - 1) of them, as
    NCCL's tuning model counts them. gloo's is a ring; NCCL chooses between rings and trees.

    Half precision is rounded at each of the p - 1 additions.
    """

    name = "ring"

    def check(self, topology: Topology) -> None:
        """Any layout will do."""

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        collectives.all_reduce(tensor, topology.groups.world).wait()

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        tally = Tally(topology)
        tally.rings([range(topology.world_size)], size_bytes)
        return tally.traffic()
