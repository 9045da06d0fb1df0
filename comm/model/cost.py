"""What an all-reduce costs: the latency-bandwidth model, with one link per level.

A transfer of n bytes takes ``alpha + n * beta`` seconds (Hockney 1994; Thakur, Rabenseifner and
Gropp 2005 for collectives). An algorithm's traffic gives how often each level's alpha and how many
of its bytes must follow one another. The time of adding numbers (gamma) is per byte too, so it is
a part of beta here: measurements of whole all-reduces hardly tell them apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from ..algorithms import Algorithm
from ..plan import WIRE_DTYPES, Rule
from ..topology import Topology
from ..traffic import Traffic

_UNIT_BYTES = 2**40


@dataclass(frozen=True)
class Level:
    """One level of link.

    Attributes:
        latency_seconds: alpha, of one transfer.
        seconds_per_byte: beta. Inside a node it is of one rank's link; between nodes it is of all
            that joins a node to the others.
    """

    latency_seconds: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency_seconds), ("time", self.seconds_per_byte)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"the {name} of a link must be a number from 0 on, not {value}")

    @classmethod
    def of(cls, latency_us: float, gbit: float) -> Level:
        """A link of so many microseconds and gigabits per second."""
        if not gbit > 0:
            raise ValueError(f"the rate of a link must be above 0 Gbit/s, not {gbit}")
        return cls(latency_us * 1e-6, 8e-9 / gbit)

    @property
    def latency_us(self) -> float:
        return self.latency_seconds * 1e6

    @property
    def gbit(self) -> float:
        """Gigabits per second; infinite where bytes cost nothing."""
        return 8e-9 / self.seconds_per_byte if self.seconds_per_byte else math.inf


@dataclass(frozen=True)
class Links:
    """The links of a cluster.

    Attributes:
        intra: inside a node; None where nothing is known of it, as nothing crosses it.
        inter: between nodes; the same.
        host_seconds_per_byte: that the ranks of a node share, for each byte that they send to one
            another, all together: where their processors copy the messages, as gloo does. 0 where
            each GPU has links of its own.
    """

    intra: Level | None
    inter: Level | None
    host_seconds_per_byte: float = 0.0

    def seconds(self, traffic: Traffic, nodes: int) -> tuple[float, float]:
        """The time of ``traffic`` inside each of ``nodes`` and between them, in seconds.

        Raises:
            ValueError: it crosses a level of which nothing is known.
        """
        host = traffic.total_intra_bytes / nodes * self.host_seconds_per_byte
        return (
            _seconds("inside a node", self.intra, traffic.intra_messages, traffic.intra_bytes)
            + host,
            _seconds("between nodes", self.inter, traffic.inter_messages, traffic.inter_bytes),
        )


def _seconds(where: str, level: Level | None, messages: int, size_bytes: float) -> float:
    if level is None:
        if messages or size_bytes:
            raise ValueError(f"nothing is known of the links {where}")
        return 0.0
    return messages * level.latency_seconds + size_bytes * level.seconds_per_byte


def predict_seconds(
    rule: Rule, size_bytes: int, topology: Topology, links: Links, *, element_bytes: int = 4
) -> float:
    """The time of one all-reduce of ``size_bytes`` by ``rule``, in seconds.

    Phases inside nodes and between them follow one another, unless the algorithm keeps both levels
    busy in every step, when bytes take as long as on the slower one. Where the rule cuts the
    message into chunks, the chunks are a pipeline through the two levels: the first passes both,
    and each further one adds the time of the slower.

    Args:
        size_bytes: in the gradients' dtype.
        element_bytes: of one number in that dtype.

    Raises:
        ValueError: a message must cross a level of which nothing is known.
        TopologyError: the algorithm does not work on this layout.
    """
    rule.implementation.check(topology)
    nodes = len(topology.nodes)
    if rule.wire_dtype is not None:
        size_bytes = size_bytes * WIRE_DTYPES[rule.wire_dtype].itemsize // element_bytes
    chunk = rule.chunk_bytes
    if chunk is None or chunk >= size_bytes:
        return _whole(traffic_of(rule, size_bytes, topology), links, nodes)
    count, rest = divmod(size_bytes, chunk)
    intra, inter = links.seconds(traffic_of(rule, chunk, topology), nodes)
    last = max(links.seconds(traffic_of(rule, rest, topology), nodes)) if rest else 0.0
    return intra + inter + (count - 1) * max(intra, inter) + last


def _whole(traffic: Traffic, links: Links, nodes: int) -> float:
    if not traffic.concurrent:
        return sum(links.seconds(traffic, nodes))
    latency = replace(traffic, intra_bytes=0.0, inter_bytes=0.0, total_intra_bytes=0.0)
    volume = replace(traffic, intra_messages=0, inter_messages=0)
    return sum(links.seconds(latency, nodes)) + max(links.seconds(volume, nodes))


def traffic_of(rule: Rule, size_bytes: int, topology: Topology) -> Traffic:
    """What a message of ``size_bytes`` sends by ``rule``, uncut: its bytes grow with the size."""
    unit = _unit_traffic(rule.implementation, topology.nodes)  # type: ignore[arg-type]
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
    # Counted step by step over all ranks, which takes a while where there are thousands.
    return algorithm.traffic(_UNIT_BYTES, Topology(nodes))
