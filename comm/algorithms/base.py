"""What an all-reduce algorithm is: how it runs and what traffic it causes, side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from ..collectives import Pending
from ..topology import Topology
from ..traffic import Traffic


class Algorithm(Protocol):
    """An all-reduce."""

    name: str

    def check(self, topology: Topology) -> None:
        """Raise TopologyError if it does not work on this layout of ranks."""

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        """Sum ``tensor`` (1-d, contiguous) over all ranks in place.

        Returns when the result is there (gloo), or when it is ordered on the current stream
        (NCCL). All ranks get the same bits. Every rank must make the same calls in the same order.
        """

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        """What summing ``size_bytes`` over ``topology`` sends, to within whole elements."""


class Phased(ABC):
    """An all-reduce in phases on different levels of link, which chunks can go through in turn."""

    name: str

    @abstractmethod
    def phases(self, tensor: Tensor, topology: Topology) -> Iterator[Pending]:
        """Start one phase after the other, and hand out each to be waited for before the next.

        Every rank hands out as many. What follows the last is no collective.
        """

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        """Sum ``tensor`` (1-d, contiguous) over all ranks in place, a phase at a time."""
        for pending in self.phases(tensor, topology):
            pending.wait()
