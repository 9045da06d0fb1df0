"""Simulate one training step on a cluster of any size.

The simulation follows DDP: gradients are fused into buckets in the order in which backward produces
them, and each full bucket is reduced by the plan's rule for its size, one bucket at a time, while
backward continues. Communication that remains after backward is exposed. A cluster may have
stragglers, for whom all ranks wait: its ``straggler_sigma``. Waiting for input or for other users
of the network is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..algorithms import ALGORITHMS, Phased, Torus, TwoLevel
from ..plan import DEFAULT_FUSION_THRESHOLD_BYTES, Plan, Rule
from ..topology import Topology, TopologyError
from .calibrate import Calibration
from .choose import choose
from .cost import Links, predict_seconds, traffic_of
from .nccl import Nccl
from .profile import Gradient, Profile
from .step_time import straggler_slowdown

#: Message sizes at which a plan is predicted: 1 KiB to 128 MiB.
SIZES_BYTES: tuple[int, ...] = tuple(2**k for k in range(10, 28))

#: Fusion thresholds to choose from: no fusion, then 256 KiB to 128 MiB.
THRESHOLDS_BYTES: tuple[int, ...] = (1, *(2**k for k in range(18, 28)))


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes and the links between them."""

    topology: Topology  #: Its own ``rank`` does not matter.
    links: Links
    #: Correction factors measured on exactly these ranks.
    calibration: Calibration = field(default_factory=Calibration)
    nccl: Nccl | None = None  #: Predicts every rule, in place of the links, if it is given.
    straggler_sigma: float = 0.0  #: Relative standard deviation of a rank's time of a step.

    @classmethod
    def of(
        cls,
        gpus: int,
        gpus_per_node: int,
        links: Links | None = None,
        *,
        nccl: Nccl | None = None,
        straggler_sigma: float = 0.0,
    ) -> Cluster:
        """Create a cluster of ``gpus`` GPUs in equal nodes; a single node if they fit in one.

        The links are by default those of ``nccl``.

        Raises:
            TopologyError: the GPUs do not fill whole nodes.
            ValueError: neither ``links`` nor ``nccl`` are given.
        """
        if links is None:
            if nccl is None:
                raise ValueError("links: missing; valid: links, or nccl")
            links = nccl.links
        topology = Topology.of(gpus, min(gpus, gpus_per_node))
        return cls(topology, links, nccl=nccl, straggler_sigma=straggler_sigma)

    def seconds(self, rule: Rule, size_bytes: int, *, element_bytes: int = 4) -> float:
        """Predict the seconds of one all-reduce, by NCCL's model or that of the links."""
        if self.nccl is not None:
            return self.nccl.seconds(rule, size_bytes, self.topology, element_bytes=element_bytes)
        predicted = predict_seconds(
            rule, size_bytes, self.topology, self.links, element_bytes=element_bytes
        )
        return predicted * self.calibration.factor(rule, size_bytes)


@dataclass(frozen=True)
class Reduction:
    """The all-reduce of one bucket; seconds are counted from the start of backward."""

    size_bytes: int
    rule: Rule
    ready_seconds: float  # when the bucket's last gradient is available
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Simulation:
    """One simulated training step."""

    compute_seconds: float  #: Mean time of the step without communication.
    step_seconds: float
    reductions: tuple[Reduction, ...]  #: In order.
    waiting_seconds: float = 0.0  #: By which the slowest rank computes longer than the mean.

    @property
    def communication_seconds(self) -> float:
        """Total time of all all-reduces, in seconds."""
        return sum(r.end_seconds - r.start_seconds for r in self.reductions)

    @property
    def exposed_seconds(self) -> float:
        """Communication time not hidden by backward, in seconds."""
        return self.step_seconds - self.compute_seconds - self.waiting_seconds


def buckets(gradients: Iterable[Gradient], plan: Plan) -> list[tuple[Gradient, ...]]:
    """Fuse consecutive gradients as DDP does: a bucket is full once it reaches its size."""
    limits = plan.bucket_limits
    full: list[tuple[Gradient, ...]] = []
    filling: list[Gradient] = []
    for gradient in gradients:
        filling.append(gradient)
        limit = limits[min(len(full), len(limits) - 1)]
        if sum(g.size_bytes for g in filling) >= limit:
            full.append(tuple(filling))
            filling = []
    return [*full, tuple(filling)] if filling else full


def simulate(profile: Profile, cluster: Cluster, plan: Plan) -> Simulation:
    """Simulate one training step.

    Raises:
        TopologyError: an algorithm of the plan does not support the layout of the ranks.
        ValueError: a message must cross links that are unknown.
    """
    plan.check(cluster.topology)
    compute_seconds = profile.compute_seconds
    slower = straggler_slowdown(cluster.topology.world_size, cluster.straggler_sigma)
    if slower > 1:
        profile = profile.scaled(compute_seconds * slower)
    known: dict[int, float] = {}
    free, done = 0.0, []
    for bucket in buckets(profile.gradients, plan):
        size = sum(g.size_bytes for g in bucket)
        rule = plan.rule_for(size)
        if size not in known:
            known[size] = cluster.seconds(rule, size, element_bytes=profile.element_bytes)
        ready = bucket[-1].ready_seconds
        start = max(ready, free)
        free = start + known[size]
        done.append(Reduction(size, rule, ready, start, free))
    step = profile.forward_seconds + max(profile.backward_seconds, free)
    waiting = profile.compute_seconds - compute_seconds
    return Simulation(compute_seconds, step, tuple(done), waiting)


def candidates(
    topology: Topology,
    *,
    chunks_bytes: Sequence[int] = (),
    wire_dtypes: Sequence[str] = (),
    sum_dtype: str | None = None,
) -> tuple[Rule, ...]:
    """Return the rules without ``max_bytes`` that a plan may consist of, the flat ring first.

    These are all algorithms that support the layout: without chunks and, if phases on different
    links can overlap, with each of ``chunks_bytes``; in the gradients' dtype and in each of
    ``wire_dtypes``, in the latter only those that can sum in ``sum_dtype``, if it is given. The
    torus is omitted, since in its default shape it is the hierarchical all-reduce.
    """
    rules: list[Rule] = []
    for name, algorithm in ALGORITHMS.items():
        if isinstance(algorithm, Torus):
            continue
        try:
            algorithm.check(topology)
        except TopologyError:
            continue
        traffic = traffic_of(Rule(name), 1, topology)
        overlaps = isinstance(algorithm, Phased) and traffic.intra_bytes and traffic.inter_bytes
        for wire in (None, *wire_dtypes):
            sums = None if wire is None else sum_dtype
            if sums is not None and not isinstance(algorithm, TwoLevel):
                continue
            for chunk in (None, *(chunks_bytes if overlaps else ())):
                rules.append(Rule(name, wire_dtype=wire, chunk_bytes=chunk, sum_dtype=sums))
    return tuple(rules)


def predict_plan(profile: Profile, cluster: Cluster, rules: Sequence[Rule]) -> Plan:
    """Return the plan with the shortest predicted time: rules by size and the fusion threshold."""
    times = {
        size: {
            rule: cluster.seconds(rule, size, element_bytes=profile.element_bytes) for rule in rules
        }
        for size in SIZES_BYTES
    }
    chosen = choose(times, tolerance=0.0)
    return Plan(chosen, best_threshold(profile, cluster, chosen))


def best_threshold(profile: Profile, cluster: Cluster, rules: tuple[Rule, ...]) -> int:
    """Return the bytes with the shortest step; DDP's default if it is within 1 % of that."""
    steps = {
        threshold: simulate(profile, cluster, Plan(rules, threshold)).step_seconds
        for threshold in (DEFAULT_FUSION_THRESHOLD_BYTES, *THRESHOLDS_BYTES)
    }
    least = min(steps.values())
    if steps[DEFAULT_FUSION_THRESHOLD_BYTES] <= 1.01 * least:
        return DEFAULT_FUSION_THRESHOLD_BYTES
    return min(threshold for threshold, seconds in steps.items() if seconds == least)
