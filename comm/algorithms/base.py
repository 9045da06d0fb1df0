"""The interface of an all-reduce algorithm: how it runs, and what traffic it causes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from ..collectives import Pending
from ..topology import Topology
from ..traffic import Traffic


class Algorithm(ABC):
    """An all-reduce algorithm."""

    name: str

    def check(self, topology: Topology) -> None:  # noqa: B027
        """Raise TopologyError if the algorithm does not support this layout; any by default."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        """Sum ``tensor`` (1-d, contiguous) over all ranks in place.

        Returns when the result is available (gloo), or when it is ordered on the current stream
        (NCCL). All ranks get bitwise identical results. Every rank must make the same calls in the
        same order.
        """

    @abstractmethod
    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        """Return the traffic of reducing ``size_bytes``, up to rounding to whole elements."""


class Phased(Algorithm):
    """An all-reduce in phases on different link levels, through which chunks can be pipelined."""

    @abstractmethod
    def phases(self, tensor: Tensor, topology: Topology) -> Iterator[Pending]:
        """Start the phases one by one, yielding each to be waited for before the next starts."""
        # Every rank yields the same number of phases. No collective follows the last one. On CUDA,
        # phases of a chunk run on different streams, so keep temporaries until the iterator ends:
        # memory that is freed earlier may be given to another chunk while a stream still uses it.

    def shares(self, elements: int, topology: Topology) -> tuple[int, ...] | None:
        """Elements that each rank of this node sums in shared memory; None if it cannot."""
        return None

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        for pending in self.phases(tensor, topology):
            pending.wait()
