"""The time of NCCL's collectives, by NCCL's own model.

NCCL predicts every algorithm and protocol and takes the fastest (src/graph/tuning.cc of about
version 2.8, whose constants are used here). A ring or a tree by the protocol LL, LL128 or Simple
takes ``latency + bytes / bandwidth``. Added to that is the time in which the host issues a call,
which makes it LogGP (Alexandrov et al. 1995): overhead, latency, gap. It decides about algorithms
of many small messages, each of which is a call from Python.

Bandwidths are measured bus bandwidths, as nccl-tests reports them, not line rates. Left out are
NCCL's limits per channel, in-network reduction (SHARP, NVLS), and PAT.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..plan import WIRE_DTYPES, PlanError, Rule
from ..topology import Topology
from .cost import Level, Links, pipelined, predict_seconds, traffic_of

_PROTOCOLS = ("LL", "LL128", "Simple")

# Microseconds, by protocol. Of the tree with Simple, a step is the time of a chunk of 256 kB.
_BASE = {"tree": (4.4, 4.4, 0.0), "ring": (3.6, 10.0, 8.4)}
_STEP = {
    ("nvlink", "tree"): (0.52, 1.2, 28.0),
    ("nvlink", "ring"): (0.47, 1.9, 3.4),
    ("pcie", "tree"): (1.0, 1.9, 28.0),
    ("pcie", "ring"): (1.0, 2.5, 5.7),
    ("network", "tree"): (5.0, 8.5, 50.0),
    ("network", "ring"): (2.7, 4.0, 9.6),
}

# Share of a tree's bandwidth that messages of 64 B, 128 B, ... reach, by protocol; then all of it.
_TREE_SHARE = (
    (*(1.0,) * 4, 0.9, 0.8, *(0.7,) * 4, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    (*(1.0,) * 5, 0.9, *(0.8,) * 3, 0.7, *(0.6,) * 3, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9),
    (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, *(0.5,) * 6, 0.6, 0.6, 0.7, 0.8, 0.9),
)

#: Time in which the host issues one call of a collective from PyTorch. Assumed.
HOST_SECONDS = 20e-6
# Of an algorithm in phases, or of a message: a send, a receive and an addition.
_CALLS = 3


@dataclass(frozen=True)
class Nccl:
    """A cluster as NCCL sees it; ValueError if a value is not positive."""

    intra_gbytes: float  #: Bus bandwidth inside a node, in 10^9 bytes per second.
    inter_gbytes: float  #: Bus bandwidth of a node's network, in 10^9 bytes per second.
    nvlink: bool = True  #: Whether GPUs of a node are joined by NVLink. LL128 needs it.
    nics: int = 1  #: Network adapters of a node. One GPU alone uses one of them.
    #: Largest bus bandwidth of a tree on one or two nodes, and on more.
    tree_gbytes: tuple[float, float] = (110.0, 80.0)
    host_seconds: float = HOST_SECONDS  #: Time in which the host issues one call.

    def __post_init__(self) -> None:
        for name in ("intra_gbytes", "inter_gbytes", "nics"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)}; valid: above 0, finite")
        if len(self.tree_gbytes) != 2 or not all(0 < rate < math.inf for rate in self.tree_gbytes):
            raise ValueError(f"tree_gbytes: {self.tree_gbytes}; valid: two numbers above 0, finite")
        if not 0 <= self.host_seconds < math.inf:
            raise ValueError(f"host_seconds: {self.host_seconds}; valid: 0 or more, finite")

    @property
    def links(self) -> Links:
        """The same links for the latency-bandwidth model, with the latencies of Simple."""
        inside = _STEP["nvlink" if self.nvlink else "pcie", "ring"][2]
        between = _STEP["network", "ring"][2]
        return Links(
            Level.of(inside, 8 * self.intra_gbytes), Level.of(between, 8 * self.inter_gbytes)
        )

    def all_reduces(
        self, size_bytes: float, ranks: int, nodes: int, *, network_gbytes: float | None = None
    ) -> dict[tuple[str, str], float]:
        """Predict ``ncclAllReduce`` in seconds by algorithm and protocol, without the host."""
        # ``network_gbytes`` stands for a part of the bus bandwidth of a node's network.
        if ranks == 1:
            return {("ring", "Simple"): 0.0}
        network = self.inter_gbytes if network_gbytes is None else network_gbytes
        bus = self.intra_gbytes if nodes == 1 else min(self.intra_gbytes, network)
        found = {}
        for at, protocol in enumerate(_PROTOCOLS):
            if protocol == "LL128" and not self.nvlink:
                continue
            few = 0.7 if nodes > 1 and ranks < 2 * nodes else 0.92  # LL128 with one GPU per node
            share = (0.25, few, 1.0)[at]
            latency = self._steps("ring", at, 2 * (ranks - nodes), 2 * (nodes - 1), nodes)
            if protocol == "Simple" and nodes > 1 and size_bytes >= 4096 * ranks:
                latency *= 1.9  # "plateau effect of ring" in NCCL's source
            seconds = latency + 2 * (ranks - 1) / ranks * size_bytes / (1e9 * bus * share)
            found["ring", protocol] = seconds
            limit = self.tree_gbytes[nodes > 2]
            share = (1 / 3.8, 7 / 9 if nodes == 1 else 0.915, 1.0)[at]
            hops = int(math.log2(nodes))
            latency = self._steps("tree", at, 2 * (ranks / nodes - 1), 2 * hops, nodes)
            power = int(math.log2(max(1.0, size_bytes / 64)))
            if power < len(_TREE_SHARE[at]):
                share *= _TREE_SHARE[at][power]
            seconds = latency + 2 * size_bytes / (1e9 * min(0.9 * bus, limit) * share)
            found["tree", protocol] = seconds
        return found

    def seconds(
        self, rule: Rule, size_bytes: int, topology: Topology, *, element_bytes: int = 4
    ) -> float:
        """Predict the seconds of one message by ``rule``, with the host's overhead of all calls.

        The point-to-point algorithms are predicted by the latency-bandwidth model on :attr:`links`,
        with three calls for each message. Sizes are those in the gradients' dtype.

        Raises:
            TopologyError: the algorithm does not support this layout.
            PlanError: the rule has a ``sum_dtype``, whose all-to-alls NCCL has no model of.
        """
        if rule.sum_dtype is not None:
            raise PlanError(
                f"sum_dtype: NCCL's model does not predict sums in {rule.sum_dtype}; valid: null, "
                "or links fitted by comm tune"
            )
        rule.implementation.check(topology)
        if rule.wire_dtype is not None:
            size_bytes = size_bytes * WIRE_DTYPES[rule.wire_dtype].itemsize // element_bytes
        ranks, nodes = topology.world_size, len(topology.nodes)
        if ranks == 1:
            return 0.0
        if rule.algorithm == "ring":
            return self.host_seconds + min(self.all_reduces(size_bytes, ranks, nodes).values())
        if rule.algorithm in ("hierarchical", "torus", "leader"):
            return self._in_phases(rule, size_bytes, topology)
        bare = Rule(rule.algorithm)
        traffic = traffic_of(bare, size_bytes, topology)
        calls = _CALLS * (traffic.intra_messages + traffic.inter_messages)
        return calls * self.host_seconds + predict_seconds(bare, size_bytes, topology, self.links)

    def _in_phases(self, rule: Rule, size_bytes: int, topology: Topology) -> float:
        """A rule whose phases inside nodes and between them form a pipeline of chunks."""
        chunk = max(1, min(rule.chunk_bytes or size_bytes, size_bytes))
        seconds = pipelined(size_bytes, chunk, lambda size: self._phases(rule, size, topology))
        return seconds + _CALLS * -(-size_bytes // chunk) * self.host_seconds

    def _phases(self, rule: Rule, size_bytes: float, topology: Topology) -> tuple[float, float]:
        """Seconds of the phases inside nodes or rows, and of that between them."""
        nodes = len(topology.nodes)
        local = max(len(ranks) for ranks in topology.nodes)
        if rule.algorithm == "leader":
            rows, columns, share, adapters = local, nodes, 1, self.nics
        else:
            rows, columns = rule.shape or (local, nodes)
            share, adapters = rows, min(rows, local)  # the columns that share a node's network
        spans = max(1, rows // local)  # nodes of a row
        intra = inter = 0.0
        if rows > 1:
            intra = 2 * self._half(size_bytes, rows, spans, whole=rule.algorithm == "leader")
        if columns > 1:
            network = self.inter_gbytes / adapters
            ways = self.all_reduces(
                size_bytes / share, columns, min(columns, nodes), network_gbytes=network
            )
            inter = min(ways.values())
        return intra, inter

    def _half(self, size_bytes: float, ranks: int, nodes: int, *, whole: bool) -> float:
        """A reduce-scatter or all-gather by rings; if ``whole``, a reduce or broadcast."""
        bus = self.intra_gbytes if nodes == 1 else min(self.intra_gbytes, self.inter_gbytes)
        times = []
        for at, protocol in enumerate(_PROTOCOLS):
            if protocol == "LL128" and not self.nvlink:
                continue
            share = (1 / 3 if nodes == 1 else 1 / 4, 0.92, 1.0)[at]
            sent = 1.0 if whole else (ranks - 1) / ranks
            intra, inter = (1, 0) if whole else (ranks - nodes, nodes - 1)
            latency = self._steps("ring", at, intra, inter, nodes)
            times.append(latency + sent * size_bytes / (1e9 * bus * share))
        return min(times)

    def _steps(self, algorithm: str, at: int, intra: float, inter: int, nodes: int) -> float:
        """Latency of some steps inside nodes and between them, in seconds."""
        inside = _STEP["nvlink" if self.nvlink else "pcie", algorithm][at]
        if nodes > 1 and _PROTOCOLS[at] == "LL":
            inside *= 1.8
        between = _STEP["network", algorithm][at]
        return 1e-6 * (_BASE[algorithm][at] + intra * inside + inter * between)
