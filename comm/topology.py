"""The layout of ranks on nodes, and the process groups within nodes, across nodes and on grids.

A variable may be inherited from a shell on another node, as ``SLURM_NODEID`` from that of a batch
script, so a numbering that puts two hosts into one node is not believed.

Where the default group is bound to a device, as eager initialization on NCCL does,
``torch.distributed.new_group`` is one ``ncclCommSplit`` of all ranks for each group
(``_new_process_group_helper`` in torch's distributed_c10d.py): 256 nodes of 8 GPUs would take 264
such steps, one after the other. ``split_group`` makes all groups of a partition in one.

``new_group(use_local_synchronization=True)``, which only members call, is not used: it derives the
name of a group from a number that ranks count on their own, and ranks that once made different
groups would wait for each other under different names (torch 2.13, ``_hash_ranks_to_str``).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .node_memory import NodeMemory, connect

_logger = logging.getLogger(__name__)

#: Numberings of the nodes, in the order in which they are tried.
_NUMBERINGS = ("GROUP_RANK", "SLURM_NODEID")
_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
_HOST = "host names"

#: What a process knows of its node: host name and variables.
Place = dict[str, str | None]


class TopologyError(ValueError):
    """Raised when the ranks do not allow the requested layout."""


@dataclass(frozen=True)
class Topology:
    """The nodes of a job and the position of this process among them.

    Attributes:
        nodes: global ranks on each node, ascending within a node.
        rank: global rank of this process.
        source: what :meth:`from_environment` found the nodes by: ``"ranks_per_node"``, a name of a
            variable, or ``"host names"``; ``"given"`` if they were given.
        shared_memory: whether, on gloo, ranks of a node may pass data through memory that they
            share, if every node is a single machine with Linux. The algorithms with phases,
            ``hierarchical``, ``leader`` and ``torus`` with nodes as rows, then do so.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int = 0
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
        cls, ranks_per_node: int | None = None, *, shared_memory: bool = True
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
            shared_memory: see :class:`Topology`.

        Raises:
            TopologyError: the world size is not a multiple of ``ranks_per_node``, or ranks gave
                different values of it.
        """
        if not dist.is_initialized():
            return cls.of(1, ranks_per_node or 1)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = ranks_per_node, this_place()
        everyone = [mine] * world_size
        dist.all_gather_object(everyone, mine)
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
        return cls(nodes, rank, shared_memory, source)

    @classmethod
    def of_job(cls, given: Topology | None = None) -> Topology:
        """Return a copy, or :meth:`from_environment`, with process groups of its own."""
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
        """Return the rows of a grid of X × Y ranks, in node order, or raise TopologyError."""
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
        nodes reuses the groups within and across nodes. TopologyError: as :meth:`rows`.
        """
        rows = self.rows(shape)
        if rows == self.nodes:
            return self.groups.lines
        if shape not in self._grids:
            self._grids[shape] = Grid.of(rows)
        return self._grids[shape]

    @cached_property
    def _grids(self) -> dict[tuple[int, int], Grid]:
        return {}


class Groups:
    """The process groups of one rank; None stands for a group of this rank alone.

    Every rank must make the first use of each; :attr:`intra` and :attr:`inter` are made together.
    None is the default group, even if it has the same ranks: collectives in one group must start in
    the same order on all ranks, and those in these groups may run on a separate thread.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    @property
    def intra(self) -> ProcessGroup | None:
        """The ranks of the same node."""
        return self.lines.row

    @property
    def inter(self) -> ProcessGroup | None:
        """The ranks with the same local rank, one on each node."""
        return self.lines.column

    @cached_property
    def world(self) -> ProcessGroup | None:
        """All ranks."""
        return group_of_rank([self._topology.order])

    @cached_property
    def memory(self) -> NodeMemory | None:
        """The memory that the ranks of the same node share; None if a node has no such memory."""
        topology = self._topology
        if not topology.shared_memory or max(map(len, topology.nodes)) == 1:
            return None
        if dist.get_backend() != "gloo":
            return None
        return connect(self.intra, group_of_rank(topology.nodes))

    @cached_property
    def lines(self) -> Grid:
        """Both of these."""
        return Grid.of(self._topology.nodes)


@dataclass(frozen=True)
class Grid:
    """The process groups of one rank in a grid: X consecutive ranks, and Y at one place in rows."""

    row: ProcessGroup | None
    column: ProcessGroup | None

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Grid:
        """Make the groups of rows, which may differ in length; every rank must call it."""
        columns = [[row[i] for row in rows if i < len(row)] for i in range(max(map(len, rows)))]
        return cls(group_of_rank(rows), group_of_rank(columns))


def this_place() -> Place:
    """Return what this process knows of its node; a variable that is not set is None."""
    variables = {name: os.environ.get(name) or None for name in (*_NUMBERINGS, _LOCAL_RANK)}
    return {_HOST: socket.gethostname(), **variables}


def find_nodes(places: Sequence[Place]) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Return the ranks of each node, nodes in the order of their first ranks, and the source."""
    hosts, local_ranks, *numberings = (
        [place[name] for place in places] for name in (_HOST, _LOCAL_RANK, *_NUMBERINGS)
    )
    for name, numbers in zip(_NUMBERINGS, numberings, strict=True):
        if None not in numbers and len({*numbers}) == len({*zip(numbers, hosts, strict=True)}):
            return _grouped(numbers), name
    if None not in local_ranks and len({*zip(hosts, local_ranks, strict=True)}) < len(places):
        nodes = _runs(local_ranks)  # several machines have one name, such as localhost
        if nodes is not None:
            return _grouped(nodes), _LOCAL_RANK
    return _grouped(hosts), _HOST


def _runs(local_ranks: Sequence[str | None]) -> list[int] | None:
    """Return the node of each rank if ranks are mapped node by node, so that each counts from 0."""
    nodes = [*accumulate(int(local_rank == "0") for local_rank in local_ranks)]
    counted = [str(index) for _, run in groupby(nodes) for index, _ in enumerate(run)]
    return nodes if [*local_ranks] == counted else None  # None as by ``--map-by node``


def _grouped(labels: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    members: dict[object, list[int]] = {label: [] for label in labels}
    for rank, label in enumerate(labels):
        members[label].append(rank)
    return tuple(map(tuple, members.values()))


def group_of_rank(parts: Iterable[Iterable[int]]) -> ProcessGroup | None:
    """Make a process group of each part of the ranks, and return the one that holds this rank.

    Every rank must call it with the same parts, none of which overlap. Collectives in the groups
    time out as those of the default group do.

    Returns:
        The group; None if this rank's part has no other rank, or it is in none.
    """
    members = [sorted(part) for part in parts]
    if all(len(part) == 1 for part in members):
        return None
    timeout = _default_timeout()
    if _splits():
        # A rank on its own is split off as well: torch before 2.15 names a group by the number of
        # groups that this rank is in, and ends them in the order of their names on every rank.
        others = set(range(dist.get_world_size())).difference(*members)
        members += [[rank] for rank in sorted(others)]
        group: Any = dist.split_group(split_ranks=members, timeout=timeout)
        return group if dist.get_world_size(group) > 1 else None
    own = None
    for part in members:
        if len(part) > 1:
            group = dist.new_group(part, timeout=timeout)
            own = group if dist.get_rank() in part else own
    return own


def _default_timeout() -> timedelta | None:
    """Return the timeout of the default group, which torch does not give to new groups."""
    group = dist.distributed_c10d._get_default_group()
    # torch has no public way to read it. It is the same for all devices of a group.
    backend: Any = group._get_backend(group._device_types[0])
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def _splits() -> bool:
    """Whether torch would make each group by a split of the default group, on all ranks."""
    group = dist.distributed_c10d._get_default_group()
    device = group.bound_device_id
    if device is None or device.type == "cpu":  # split_group needs an accelerator before torch 2.15
        return False
    return bool(group._get_backend(device).supports_splitting)
