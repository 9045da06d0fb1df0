"""The cost of an all-reduce by the latency-bandwidth model, with one link per level.

A transfer of n bytes takes ``alpha + n * beta`` seconds (Hockney 1994; Thakur, Rabenseifner and
Gropp 2005 for collectives). The traffic of an algorithm gives the number of sequential messages
and bytes on each level. The time to add numbers (gamma) is also proportional to bytes and is part
of beta here, because measurements of whole all-reduces can hardly separate the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..algorithms import Algorithm
from ..plan import WIRE_DTYPES, Rule
from ..topology import Topology
from ..traffic import Traffic

_UNIT_BYTES = 2**40


@dataclass(frozen=True)
class Level:
    """Latency and bandwidth of one link level.

    Attributes:
        latency_seconds: alpha, the latency of one transfer.
        seconds_per_byte: beta, of one rank's link inside a node, or of all links together that
            connect one node to the others.

    Raises:
        ValueError: a value is negative or not finite.
    """

    latency_seconds: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "seconds_per_byte"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a link cannot be {value}; valid: finite, 0 or more")

    @classmethod
    def of(cls, latency_us: float, gbit: float) -> Level:
        """Create a level from microseconds of latency and gigabits per second."""
        if not gbit > 0:
            raise ValueError(f"the rate of a link cannot be {gbit} Gbit/s; valid: above 0")
        return cls(latency_us * 1e-6, 8e-9 / gbit)

    @property
    def latency_us(self) -> float:
        """Latency in microseconds."""
        return self.latency_seconds * 1e6

    @property
    def gbit(self) -> float:
        """Gigabits per second; infinite if the time per byte is 0."""
        return 8e-9 / self.seconds_per_byte if self.seconds_per_byte else math.inf


@dataclass(frozen=True)
class Links:
    """The links of a cluster.

    Attributes:
        intra: links inside a node; None if unknown, because no message crosses them.
        inter: links between nodes; None if unknown.
        host_seconds_per_byte: time per byte that the ranks of a node send to each other, over a
            medium that they share: the host's processors, if they copy the messages as in gloo. 0
            if each GPU has links of its own.
    """

    intra: Level | None
    inter: Level | None
    host_seconds_per_byte: float = 0.0

    def seconds(self, traffic: Traffic, nodes: int) -> tuple[float, float]:
        """Return the seconds that ``traffic`` takes inside each of ``nodes`` and between them."""
        host = traffic.total_intra_bytes / nodes * self.host_seconds_per_byte
        return (
            _seconds("inside a node", self.intra, traffic.intra_messages, traffic.intra_bytes)
            + host,
            _seconds("between nodes", self.inter, traffic.inter_messages, traffic.inter_bytes),
        )


def _seconds(where: str, level: Level | None, messages: int, size_bytes: float) -> float:
    if level is None:
        if messages or size_bytes:
            raise ValueError(f"the links {where} are unknown, but messages must cross them")
        return 0.0
    return messages * level.latency_seconds + size_bytes * level.seconds_per_byte


def predict_seconds(
    rule: Rule, size_bytes: int, topology: Topology, links: Links, *, element_bytes: int = 4
) -> float:
    """Predict the seconds that one all-reduce of ``size_bytes`` takes by ``rule``.

    Phases inside nodes and between them run one after another, unless the algorithm keeps both
    levels busy in every step; then the slower level determines the time of the bytes. The chunks of
    a rule with chunks form a pipeline through the two levels: the first chunk passes both, and
    each further chunk adds the time of the slower level.

    Sizes are those in the gradients' dtype, of ``element_bytes``.

    Raises:
        ValueError: a message must cross a level whose links are unknown.
        TopologyError: the algorithm does not support this layout.
    """
    rule.implementation.check(topology)
    nodes = len(topology.nodes)
    if rule.wire_dtype is not None:
        size_bytes = size_bytes * WIRE_DTYPES[rule.wire_dtype].itemsize // element_bytes
    chunk = rule.chunk_bytes
    if chunk is None or chunk >= size_bytes:
        return _whole(traffic_of(rule, size_bytes, topology), links, nodes)
    return pipelined(
        size_bytes, chunk, lambda size: links.seconds(traffic_of(rule, size, topology), nodes)
    )


def pipelined(
    size_bytes: int, chunk_bytes: int, phases: Callable[[int], tuple[float, float]]
) -> float:
    """Return the seconds of a pipeline of chunks, whose two phases take ``phases(bytes)``."""
    count, rest = divmod(size_bytes, chunk_bytes)
    intra, inter = phases(chunk_bytes)
    last = max(phases(rest)) if rest else 0.0
    return intra + inter + (count - 1) * max(intra, inter) + last


def _whole(traffic: Traffic, links: Links, nodes: int) -> float:
    if not traffic.concurrent:
        return sum(links.seconds(traffic, nodes))
    latency = replace(traffic, intra_bytes=0.0, inter_bytes=0.0, total_intra_bytes=0.0)
    volume = replace(traffic, intra_messages=0, inter_messages=0)
    return sum(links.seconds(latency, nodes)) + max(links.seconds(volume, nodes))


def traffic_of(rule: Rule, size_bytes: int, topology: Topology) -> Traffic:
    """Return the traffic of one message by ``rule``, without chunks; bytes scale with the size."""
    unit = _unit_traffic(rule.implementation, topology.nodes)
    share = size_bytes / _UNIT_BYTES
    return replace(
        unit,
        intra_bytes=unit.intra_bytes * share,
        inter_bytes=unit.inter_bytes * share,
        total_intra_bytes=unit.total_intra_bytes * share,
        total_inter_bytes=unit.total_inter_bytes * share,
    )


@lru_cache(maxsize=256)
def _unit_traffic(algorithm: Algorithm, nodes: tuple[tuple[int, ...], ...]) -> Traffic:
    # Cached, because counting step by step is slow with thousands of ranks.
    return algorithm.traffic(_UNIT_BYTES, Topology(nodes))
