"""The time of a training step on a cluster that is not there.

As DDP runs it: gradients are fused into buckets in the order in which backward produces them, and
each full bucket is reduced by the plan's rule for its size, one bucket after another, while
backward goes on. What is left when backward has ended is exposed. All ranks are alike: waiting for
the slowest of them, for input, or for other users of the network is not in the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..algorithms import ALGORITHMS, Phased, Torus
from ..plan import DEFAULT_FUSION_THRESHOLD_BYTES, Plan, Rule
from ..topology import Topology, TopologyError
from .calibrate import Calibration
from .choose import choose
from .cost import Links, predict_seconds, traffic_of
from .profile import Gradient, Profile

#: Sizes that a plan is predicted for: 1 KiB to 128 MiB.
SIZES_BYTES: tuple[int, ...] = tuple(2**k for k in range(10, 28))

#: Thresholds that a plan is chosen from: each tensor alone, then 256 KiB to 128 MiB.
THRESHOLDS_BYTES: tuple[int, ...] = (1, *(2**k for k in range(18, 28)))


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes, and what joins them.

    Attributes:
        topology: which rank sits on which node; nobody's in particular.
        links: of both levels.
        calibration: what all-reduces took on these very ranks, beside what the links tell.
    """

    topology: Topology
    links: Links
    calibration: Calibration = field(default_factory=Calibration)

    @classmethod
    def of(cls, gpus: int, gpus_per_node: int, links: Links) -> Cluster:
        """So many GPUs in nodes of equal size; on one node if they are fewer than it has.

        Raises:
            TopologyError: they do not fill whole nodes.
        """
        return cls(Topology.of(gpus, min(gpus, gpus_per_node)), links)

    def seconds(self, rule: Rule, size_bytes: int, *, element_bytes: int = 4) -> float:
        """The time of one all-reduce; see :func:`predict_seconds`."""
        told = predict_seconds(
            rule, size_bytes, self.topology, self.links, element_bytes=element_bytes
        )
        return told * self.calibration.factor(rule, size_bytes)


@dataclass(frozen=True)
class Reduction:
    """One bucket. Times are from the start of backward, in seconds.

    Attributes:
        size_bytes: in the gradients' dtype.
        rule: what reduces it.
        ready_seconds: when its last gradient is there.
        start_seconds: when the communication stream gets to it.
        end_seconds: when it is reduced.
    """

    size_bytes: int
    rule: Rule
    ready_seconds: float
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Simulation:
    """One step.

    Attributes:
        compute_seconds: of the step without communication.
        step_seconds: of the step.
        reductions: in order.
    """

    compute_seconds: float
    step_seconds: float
    reductions: tuple[Reduction, ...]

    @property
    def communication_seconds(self) -> float:
        """That buckets are being reduced."""
        return sum(r.end_seconds - r.start_seconds for r in self.reductions)

    @property
    def exposed_seconds(self) -> float:
        """That the step waits for communication."""
        return self.step_seconds - self.compute_seconds

    @property
    def efficiency(self) -> float:
        """Throughput of a GPU against one that works alone, from 0 to 1."""
        return self.compute_seconds / self.step_seconds


def buckets(gradients: Iterable[Gradient], plan: Plan) -> list[tuple[Gradient, ...]]:
    """Fuse consecutive gradients as DDP does: a bucket is full when it reaches its size."""
    limits = plan.segments or (plan.fusion_threshold_bytes,)
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
    """Predict one step.

    Raises:
        TopologyError: the plan has an algorithm that does not work on such nodes.
        ValueError: a message must cross links of which nothing is known.
    """
    plan.check(cluster.topology)
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
    return Simulation(profile.compute_seconds, step, tuple(done))


def candidates(
    topology: Topology,
    *,
    chunks_bytes: Sequence[int] = (),
    wire_dtypes: Sequence[str] = (),
) -> tuple[Rule, ...]:
    """What a plan may be made of on these ranks: rules without ``max_bytes``, flat first.

    Every algorithm that works on the layout, whole and cut into chunks where its phases can be
    pipelined, in the gradients' dtype and in each of ``wire_dtypes``. The torus is left out: in
    its default shape it is the hierarchical all-reduce.
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
            rules.append(Rule(name, wire_dtype=wire))
            if overlaps:
                rules += [Rule(name, wire_dtype=wire, chunk_bytes=c) for c in chunks_bytes]
    return tuple(rules)


def predict_plan(
    profile: Profile, cluster: Cluster, rules: Sequence[Rule], *, tolerance: float = 0.0
) -> Plan:
    """The plan that the model finds fastest: rules by size, and the fusion threshold.

    Args:
        rules: that it may be made of; see :func:`candidates`.
        tolerance: flat stays unless something is faster by more than this share.
    """
    times = {
        size: {
            rule: cluster.seconds(rule, size, element_bytes=profile.element_bytes) for rule in rules
        }
        for size in SIZES_BYTES
    }
    chosen = choose(times, tolerance=tolerance)
    return Plan(chosen, best_threshold(profile, cluster, chosen))


def best_threshold(profile: Profile, cluster: Cluster, rules: tuple[Rule, ...]) -> int:
    """The fusion threshold with the shortest step, in bytes.

    DDP's own stays if it is within 1 % of that. Small buckets start while backward still runs, and
    leave little to do after it; large ones pay each latency once.
    """
    steps = {
        threshold: simulate(profile, cluster, Plan(rules, threshold)).step_seconds
        for threshold in (DEFAULT_FUSION_THRESHOLD_BYTES, *THRESHOLDS_BYTES)
    }
    least = min(steps.values())
    if steps[DEFAULT_FUSION_THRESHOLD_BYTES] <= 1.01 * least:
        return DEFAULT_FUSION_THRESHOLD_BYTES
    return min(threshold for threshold, seconds in steps.items() if seconds == least)
