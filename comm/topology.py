"""The layout of ranks on nodes, and the process groups within nodes, across nodes and on grids."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .node_memory import NodeMemory, connect
from .nodes import Place, find_nodes
from .process_groups import group_of_rank

_logger = logging.getLogger(__name__)


class TopologyError(ValueError):
    """Raised when the ranks do not allow the requested layout."""


@dataclass(frozen=True)
class Topology:
    """The nodes of a job and the position of this process among them.

    Attributes:
        nodes: global ranks on each node, ascending within a node.
        rank: global rank of this process.
        timeout: time after which a collective in one of :attr:`groups` fails; None is that of the
            default group.
        source: what :meth:`from_environment` found the nodes by: ``"ranks_per_node"``,
            ``"GROUP_RANK"``, ``"SLURM_NODEID"``, ``"OMPI_COMM_WORLD_LOCAL_RANK"`` or
            ``"host names"``; ``"given"`` if they were given.
        shared_memory: whether, on gloo, ranks of a node may pass data through memory that they
            share, if every node is a single machine with Linux. The algorithms with phases,
            ``hierarchical``, ``leader`` and ``torus`` with nodes as rows, then do so.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int = 0
    timeout: timedelta | None = None
    shared_memory: bool = True
    source: str = field(default="given", compare=False)

    def __post_init__(self) -> None:
        # A torch process group orders its ranks in the same way.
        object.__setattr__(self, "nodes", tuple(tuple(sorted(ranks)) for ranks in self.nodes))

    @classmethod
    def of(cls, world_size: int, ranks_per_node: int, rank: int = 0) -> Topology:
        """Place consecutive ranks on nodes of equal size.

        Raises:
            TopologyError: ``world_size`` is not a multiple of ``ranks_per_node``.
        """
        if ranks_per_node < 1 or world_size % ranks_per_node:
            valid = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise TopologyError(
                f"ranks_per_node: {world_size} ranks cannot be split into nodes of "
                f"{ranks_per_node}; valid: {', '.join(map(str, valid))}"
            )
        starts = range(0, world_size, ranks_per_node)
        return cls(tuple(tuple(range(s, s + ranks_per_node)) for s in starts), rank)

    @classmethod
    def from_environment(
        cls,
        ranks_per_node: int | None = None,
        *,
        timeout: timedelta | None = None,
        shared_memory: bool = True,
    ) -> Topology:
        """Find the layout of the running job; every rank must call it.

        The ranks exchange what they know in one collective of the default group, whatever that is,
        and all decide from the same facts. Rank 0 logs the result at level INFO.

        Args:
            ranks_per_node: number of consecutive ranks to treat as one node, the same on all ranks.
                By default, nodes are what torchrun numbers in ``GROUP_RANK``, or else ``srun`` in
                ``SLURM_NODEID``, or else machines of the same host name. Where host names repeat on
                several machines, ``OMPI_COMM_WORLD_LOCAL_RANK`` of Open MPI's ``mpirun`` tells them
                apart.
            timeout: time after which a collective in one of :attr:`groups` fails; None is that of
                the default group.
            shared_memory: see :class:`Topology`.

        Raises:
            TopologyError: the world size is not a multiple of ``ranks_per_node``, or ranks gave
                different values of it.
        """
        if not dist.is_initialized():
            return cls.of(1, ranks_per_node or 1)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        everyone: list[tuple[int | None, Place]] = [(None, Place())] * world_size
        dist.all_gather_object(everyone, (ranks_per_node, Place()))
        for other, (asked, _) in enumerate(everyone):
            if asked != everyone[0][0]:
                raise TopologyError(
                    f"ranks_per_node: {everyone[0][0]} on rank 0, {asked} on rank {other}; "
                    "valid: the same on all ranks"
                )
        if ranks_per_node is not None:
            nodes, source = cls.of(world_size, ranks_per_node).nodes, "ranks_per_node"
        else:
            nodes, source = find_nodes([place for _, place in everyone])
        if rank == 0:
            sizes = ", ".join(str(len(node)) for node in nodes)
            _logger.info("nodes of %s ranks, found by %s", sizes, source)
        return cls(nodes, rank, timeout, shared_memory, source)

    @classmethod
    def of_job(cls, given: Topology | None = None) -> Topology:
        """Return a copy of ``given`` for this rank; :meth:`from_environment` if it is None.

        Its process groups and memory are its own. Every rank must call it.

        Raises:
            TopologyError: there is no process group yet, or it has other ranks than ``given``.
        """
        if not dist.is_initialized():
            raise TopologyError(
                "topology: there is no process group yet; valid: connect after init_process_group"
            )
        topology = given or cls.from_environment()
        if topology.world_size != dist.get_world_size():
            raise TopologyError(
                f"topology: {topology.world_size} ranks, but the process group has "
                f"{dist.get_world_size()}; valid: Topology.from_environment()"
            )
        return replace(topology, rank=dist.get_rank())

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(node) for node in self.nodes)

    @property
    def order(self) -> tuple[int, ...]:
        """All ranks, node by node."""
        return tuple(rank for ranks in self.nodes for rank in ranks)

    @property
    def node(self) -> int:
        """Index of this process's node."""
        return next(i for i, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """Index of this process within its node."""
        return self.nodes[self.node].index(self.rank)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node.

        Raises:
            TopologyError: nodes differ in size.
        """
        sizes = [len(node) for node in self.nodes]
        if len(set(sizes)) > 1:
            raise TopologyError(
                f"algorithm: nodes have {', '.join(map(str, sizes))} ranks, but this one needs the "
                "same number on each; valid: ring, leader, halving-doubling, parameter-server"
            )
        return sizes[0]

    @cached_property
    def groups(self) -> Groups:
        """The process groups of this rank, within and across nodes and of all ranks."""
        # Of a copy: in a cycle of references, the groups would keep the job's store until the
        # garbage collector finds it, and a process group made anew at its port would get it again.
        return Groups(replace(self))

    def in_default_group(self) -> Topology:
        """Return a copy whose group of all ranks is the default one, in which DDP communicates."""
        copy = replace(self)
        copy.groups.world = dist.group.WORLD
        return copy

    def among(self, ranks: Iterable[int]) -> Topology:
        """Return the layout of some of the ranks, in which the first stands for an absent one."""
        chosen = set(ranks)
        nodes = [[rank for rank in node if rank in chosen] for node in self.nodes]
        rank = self.rank if self.rank in chosen else min(chosen)
        return replace(
            self,
            nodes=tuple(tuple(node) for node in nodes if node),
            rank=rank,
            shared_memory=self.shared_memory and len(chosen) == self.world_size,
        )

    def rows(self, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        """Return the rows of a grid of X × Y ranks, filled in node order with X ranks per row.

        Raises:
            TopologyError: X · Y is not the number of ranks.
        """
        x, y = shape
        if x * y != self.world_size:
            valid = [n for n in range(1, self.world_size + 1) if self.world_size % n == 0]
            shapes = ", ".join(f"{n} x {self.world_size // n}" for n in valid)
            raise TopologyError(
                f"shape: {self.world_size} ranks do not make a torus of {x} x {y}; valid: {shapes}"
            )
        order = self.order
        return tuple(tuple(sorted(order[start : start + x])) for start in range(0, x * y, x))

    def grid(self, shape: tuple[int, int]) -> Grid:
        """Return the process groups of this rank in a grid of X × Y ranks.

        They are created on first use, so every rank must make that call. A grid whose rows are the
        nodes reuses the groups within and across nodes.

        Raises:
            TopologyError: X · Y is not the number of ranks.
        """
        rows = self.rows(shape)
        if rows == self.nodes:
            return Grid(self.groups.intra, self.groups.inter)
        if shape not in self._grids:
            row = group_of_rank(rows, self.timeout)
            column = group_of_rank(zip(*rows, strict=True), self.timeout)
            self._grids[shape] = Grid(row, column)
        return self._grids[shape]

    @cached_property
    def _grids(self) -> dict[tuple[int, int], Grid]:
        return {}


class Groups:
    """The process groups of one rank; None stands for a group of this rank alone.

    They are made on first use, so every rank must make that use: :attr:`intra` and :attr:`inter`
    together, and :attr:`world` and :attr:`memory`, which not all algorithms need, on their own.

    None of them is the default group, even if it has the same ranks: collectives in one group must
    start in the same order on all ranks, and those in these groups may run on a separate thread.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    @property
    def intra(self) -> ProcessGroup | None:
        """The ranks of the same node."""
        return self._lines[0]

    @property
    def inter(self) -> ProcessGroup | None:
        """The ranks with the same local rank, one on each node."""
        return self._lines[1]

    @cached_property
    def world(self) -> ProcessGroup | None:
        """All ranks."""
        return group_of_rank([self._topology.order], self._topology.timeout)

    @cached_property
    def memory(self) -> NodeMemory | None:
        """The memory that the ranks of the same node share; None if a node has no such memory."""
        topology = self._topology
        if not topology.shared_memory or max(map(len, topology.nodes)) == 1:
            return None
        if dist.get_backend() != "gloo":
            return None
        return connect(self.intra, group_of_rank(topology.nodes, topology.timeout))

    @cached_property
    def _lines(self) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        nodes, timeout = self._topology.nodes, self._topology.timeout
        intra = group_of_rank(nodes, timeout)
        across = [
            [node[index] for node in nodes if index < len(node)]
            for index in range(max(len(node) for node in nodes))
        ]
        return intra, group_of_rank(across, timeout)


@dataclass(frozen=True)
class Grid:
    """The process groups of one rank in a grid; None stands for a group of this rank alone.

    Attributes:
        row: X consecutive ranks.
        column: the Y ranks at the same position in their rows.
    """

    row: ProcessGroup | None
    column: ProcessGroup | None
