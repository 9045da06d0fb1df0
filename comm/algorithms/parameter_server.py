"""The parameter-server baseline: one rank sums the data of all ranks."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import get_world_size

from ..collectives import exchange, send_and_sum
from ..topology import Topology
from ..traffic import Traffic
from .base import Algorithm


class ParameterServer(Algorithm):
    """All ranks send their data to rank 0, which sums it and sends the sum back to each.

    This is a parameter server with a single server, which is one of the ranks: the baseline that
    the paper compares its all-reduce with. All data passes through the server's link, as 2(p - 1)
    messages of full size, so its time grows with p, unlike the bandwidth term of a ring.

    Half precision is summed in FP32 and rounded once.
    """

    name = "parameter-server"

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        group = topology.groups.world
        if group is None:
            return
        send_and_sum(tensor, group).wait()
        if topology.rank == min(topology.order):
            workers = range(1, get_world_size(group))
            exchange([(worker, tensor) for worker in workers], [], group).wait()
        else:
            exchange([], [(0, tensor)], group).wait()

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        beside = next(len(ranks) for ranks in topology.nodes if 0 in ranks) - 1
        remote = topology.world_size - 1 - beside
        return Traffic(
            intra_messages=2 * beside,
            intra_bytes=2.0 * beside * size_bytes,
            inter_messages=2 * remote,
            inter_bytes=2.0 * remote * size_bytes,
            total_intra_bytes=2.0 * beside * size_bytes,
            total_inter_bytes=2.0 * remote * size_bytes,
        )
