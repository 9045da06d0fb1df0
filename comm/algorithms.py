"""All-reduce algorithms, each with how it runs and what traffic it causes side by side."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from . import collectives
from .topology import Topology
from .traffic import Traffic


class Algorithm(Protocol):
    """An all-reduce."""

    name: str

    def check(self, topology: Topology) -> None:
        """Raise TopologyError if it does not work on this layout of ranks."""

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        """Sum ``tensor`` (1-d, contiguous) over all ranks in place.

        Returns when the result is there (gloo), or when it is ordered on the current stream
        (NCCL). Every rank must make the same calls in the same order.
        """

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        """What summing ``size_bytes`` over ``topology`` sends."""


class Ring:
    """The back end's own all-reduce over all ranks, in rank order.

    The cost is that of a ring (Thakur, Rabenseifner and Gropp 2005): 2(p - 1) transfers of 1/p of
    the data by every rank. A chunk crosses from one node to the next on 2(N - 1) of them, as
    NCCL's tuning model counts them.
    """

    name = "ring"

    def check(self, topology: Topology) -> None:
        """Any layout will do."""

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        if topology.groups.world is not None:
            collectives.all_reduce(tensor, topology.groups.world)

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        p, nodes = topology.world_size, len(topology.nodes)
        sent = 2 * (p - 1) / p * size_bytes
        return Traffic(
            intra_messages=2 * (p - 1) - 2 * (nodes - 1),
            intra_bytes=sent if p > nodes else 0.0,
            inter_messages=2 * (nodes - 1),
            inter_bytes=sent if nodes > 1 else 0.0,
        )


class Hierarchical:
    """Reduce-scatter in the node, all-reduce across nodes by all local ranks, all-gather.

    The form of Horovod's hierarchical all-reduce and of Sony's 2-D torus (Mikami et al. 2018):
    each of a node's L ranks carries 1/L of the data across nodes, all of them in parallel, so a
    node sends 2(N - 1)/N of the data out: the least that an all-reduce can.
    """

    name = "hierarchical"

    def check(self, topology: Topology) -> None:
        _ = topology.ranks_per_node  # as many on each node

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        intra, inter = topology.groups.intra, topology.groups.inter
        if intra is None:
            if inter is not None:
                collectives.all_reduce(tensor, inter)
            return
        padding = -tensor.numel() % topology.ranks_per_node
        padded = F.pad(tensor, (0, padding)) if padding else tensor
        share = collectives.reduce_scatter(padded, intra)
        if inter is not None:
            collectives.all_reduce(share, inter)
        collectives.all_gather(share, padded, intra)
        if padding:
            tensor.copy_(padded[: tensor.numel()])

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        local, nodes = topology.ranks_per_node, len(topology.nodes)
        return Traffic(
            intra_messages=2 * (local - 1),
            intra_bytes=2 * (local - 1) / local * size_bytes,
            inter_messages=2 * (nodes - 1),
            inter_bytes=2 * (nodes - 1) / nodes * size_bytes,
        )


ALGORITHMS: dict[str, Algorithm] = {a.name: a for a in (Ring(), Hierarchical())}
