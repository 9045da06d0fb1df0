"""Which ranks share a node, from what each process knows of its own place.

torchrun numbers its agents, one per node, in ``GROUP_RANK``. Jobs that are started otherwise do not
have it: Slurm's ``srun`` numbers the nodes in ``SLURM_NODEID``, Open MPI's ``mpirun`` numbers the
processes of a node in ``OMPI_COMM_WORLD_LOCAL_RANK``, and ``mp.spawn`` tells nothing. Host names
are left then. A variable may also be inherited from a shell on another node, as ``SLURM_NODEID``
from that of a batch script, so a numbering that puts two hosts into one node is not believed.

All ranks decide from the same facts of all ranks, so they cannot arrive at different answers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Numberings of the nodes, in the order in which they are tried.
_NUMBERINGS = ("GROUP_RANK", "SLURM_NODEID")

_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"


@dataclass(frozen=True)
class Place:
    """What one process knows of the node that it is on.

    Attributes:
        host: Name of the machine.
        variables: Those of the environment that tell of the node, by name; None if unset.
    """

    host: str = field(default_factory=socket.gethostname)
    variables: dict[str, str | None] = field(
        default_factory=lambda: {
            name: os.environ.get(name) or None for name in (*_NUMBERINGS, _LOCAL_RANK)
        }
    )


def find_nodes(places: Sequence[Place]) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Return the ranks of each node, nodes in the order of their first ranks, and the source.

    Args:
        places: The place of each rank.

    Returns:
        The nodes; and what they were found by: a name of a variable, or ``"host names"``.
    """
    hosts = [place.host for place in places]
    for name in _NUMBERINGS:
        numbers = [place.variables[name] for place in places]
        if None not in numbers and len({*numbers}) == len({*zip(numbers, hosts, strict=True)}):
            return _grouped(numbers), name
    local_ranks = [place.variables[_LOCAL_RANK] for place in places]
    if None not in local_ranks and len({*zip(hosts, local_ranks, strict=True)}) < len(places):
        nodes = _runs(local_ranks)  # several machines have one name, such as localhost
        if nodes is not None:
            return _grouped(nodes), _LOCAL_RANK
    return _grouped(hosts), "host names"


def _runs(local_ranks: Sequence[str | None]) -> tuple[int, ...] | None:
    """Return the node of each rank if ranks are mapped node by node, so that each counts from 0.

    None if they are mapped otherwise (``--map-by node``): which rank is on which of several
    machines with one name cannot be told then.
    """
    nodes, node, expected = [], -1, 0
    for local_rank in local_ranks:
        if local_rank == "0":
            node, expected = node + 1, 0
        if node < 0 or local_rank != str(expected):
            return None
        nodes.append(node)
        expected += 1
    return tuple(nodes)


def _grouped(labels: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    members: dict[object, list[int]] = {}
    for rank, label in enumerate(labels):
        members.setdefault(label, []).append(rank)
    return tuple(tuple(ranks) for ranks in members.values())
