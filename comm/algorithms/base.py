"""The interface of an all-reduce algorithm: how it runs, and what traffic it causes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from ..collectives import Pending
from ..topology import Topology
from ..traffic import Traffic


class Algorithm(Protocol):
    """An all-reduce algorithm."""

    name: str

    def check(self, topology: Topology) -> None:
        """Raise TopologyError if the algorithm does not support this layout of ranks."""

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        """Sum ``tensor`` (1-d, contiguous) over all ranks in place.

        Returns when the result is available (gloo), or when it is ordered on the current stream
        (NCCL). All ranks get bitwise identical results. Every rank must make the same calls in the
        same order.
        """

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        """Return the traffic of reducing ``size_bytes``, up to rounding to whole elements."""


class Phased(ABC):
    """An all-reduce in phases on different link levels, through which chunks can be pipelined."""

    name: str

    @abstractmethod
    def phases(self, tensor: Tensor, topology: Topology) -> Iterator[Pending]:
        """Start the phases one by one, yielding each to be waited for before the next starts.

        Every rank yields the same number of phases. No collective follows the last one. On CUDA,
        phases of a chunk run on different streams, so keep temporaries until the iterator ends:
        memory that is freed earlier may be given to another chunk while a stream still uses it.
        """

    def shares(self, elements: int, topology: Topology) -> tuple[int, ...] | None:
        """Return how many of a message's elements each rank of this node sums and sends across.

        None if its phases are no sum in nodes, all-reduce across and copy in nodes, which memory
        that the ranks of a node share can replace.
        """
        return None

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        """Sum ``tensor`` (1-d, contiguous) over all ranks in place, one phase after another."""
        for pending in self.phases(tensor, topology):
            pending.wait()
