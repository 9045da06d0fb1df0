"""Jia et al.'s algorithm, step counts and speed-ups, and the models of published figures.

No input is fitted to a figure. Inputs are taken from the sources where these give them, and are
otherwise marked as assumed. Tags: [S] read in the source, [C] computed from such figures, [M]
recalled, not verified. Scaling efficiencies are in scaling_points.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import timm
import torch
from torch import Tensor, nn
from torchvision.models import alexnet
from torchvision.models.segmentation import deeplabv3_resnet50

from largebatch.comm import (
    ALGORITHMS,
    Cluster,
    Level,
    Links,
    Plan,
    Profile,
    Rule,
    Simulation,
    Topology,
    Traffic,
    estimate_profile,
    predict_plan,
    simulate,
)
from largebatch.recipes.predict.presets import INTER, INTRA


class PaperForm:
    """Jia et al.'s hierarchical all-reduce with their step counts, which assume rings throughout.

    In a group of k ranks, 2(k - 1) steps to reduce and 2(k - 1) to broadcast; among the p / k
    masters, 2(p / k - 1) steps. It can only be predicted; the implementation is ``leader``.
    """

    name = "paper"

    def check(self, topology: Topology) -> None:
        _ = topology.ranks_per_node

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        raise RuntimeError("algorithm paper can only be predicted; valid: leader")

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        k, groups = topology.ranks_per_node, len(topology.nodes)
        return Traffic(
            intra_messages=4 * (k - 1),
            intra_bytes=4 * size_bytes * (k - 1) / k,
            inter_messages=2 * (groups - 1),
            inter_bytes=2 * size_bytes * (groups - 1) / groups,
        )


@contextmanager
def paper_form() -> Iterator[None]:
    """Register the paper's algorithm in ``ALGORITHMS`` within this context."""
    ALGORITHMS["paper"] = PaperForm()
    try:
        yield
    finally:
        del ALGORITHMS["paper"]


def alexnet_bn() -> nn.Module:
    """Ginsburg's alexnet_bn for 227 pixels, with Jia et al.'s batch norm after the last pooling."""

    def conv(inputs: int, outputs: int, kernel: int, **options: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, kernel, **options), nn.ReLU()]

    return nn.Sequential(
        *conv(3, 96, 11, stride=4),
        nn.MaxPool2d(3, 2),
        nn.BatchNorm2d(96),
        *conv(96, 256, 5, padding=2, groups=2),
        nn.MaxPool2d(3, 2),
        nn.BatchNorm2d(256),
        *conv(256, 384, 3, padding=1),
        nn.BatchNorm2d(384),
        *conv(384, 384, 3, padding=1, groups=2),
        nn.BatchNorm2d(384),
        *conv(384, 256, 3, padding=1, groups=2),
        nn.MaxPool2d(3, 2),
        nn.BatchNorm2d(256),
        nn.Flatten(),
        nn.Linear(9216, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 1000),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "ResNet-50": (lambda: timm.create_model("resnet50"), (224, 224)),
    "ResNet-101": (lambda: timm.create_model("resnet101"), (224, 224)),
    "Inception V3": (lambda: timm.create_model("inception_v3"), (299, 299)),
    "VGG-16": (lambda: timm.create_model("vgg16"), (224, 224)),
    "AlexNet": (alexnet, (224, 224)),
    "AlexNet-BN": (alexnet_bn, (227, 227)),
    "DeepLabv3+": (lambda: deeplabv3_resnet50(weights=None, weights_backbone=None), (768, 1152)),
}


@cache
def profile(model: str, dtype: torch.dtype) -> Profile:
    """Estimate a profile with a step of one second, to be scaled."""
    make, size = MODELS[model]
    with torch.device("meta"):
        return estimate_profile(make(), [torch.empty(2, 3, *size)], 1.0, gradient_dtype=dtype)


@dataclass(frozen=True)
class Case:
    """A cluster and a model of Jia et al., with the inputs of a prediction.

    Attributes:
        images: images per GPU and step.
        rate: images per second of one GPU.
        fixed: each input with its source, as text.
        rules: returns the rules that the plan may consist of.
    """

    name: str
    model: str
    dtype: torch.dtype
    images: float
    rate: float
    gpus: int
    per_node: int
    links: tuple[str, str]
    fixed: tuple[str, ...]
    rules: Callable[[], tuple[Rule, ...]]

    def profile(self) -> Profile:
        return profile(self.model, self.dtype).scaled(self.images / self.rate)

    def cluster(self) -> Cluster:
        intra, inter = self.links  # latencies are those of NCCL's Simple protocol
        inside = Level.of(3.4 if intra.startswith("nvlink") else 5.7, INTRA[intra].gbit)
        links = Links(inside, Level.of(9.6, INTER[inter].gbit))
        return Cluster.of(self.gpus, self.per_node, links)

    def run(self, change: Change | None = None) -> Simulation:
        """Simulate a step on the cluster of the case, optionally with one input changed."""
        step, cluster = self.profile(), self.cluster()
        if change is not None:
            step, cluster = change.profile(step), change.cluster(cluster)
        return self.on(cluster, step)

    def on(self, cluster: Cluster, step: Profile | None = None) -> Simulation:
        """Simulate a step on a cluster with the plan of the shortest predicted time."""
        step = step or self.profile()
        return simulate(step, cluster, predict_plan(step, cluster, self.rules()))


@dataclass(frozen=True)
class Change:
    """A change of one input, to see how much the prediction depends on it."""

    name: str
    latency: float = 1.0
    rate: float = 1.0
    compute: float = 1.0

    def profile(self, step: Profile) -> Profile:
        return step.scaled(step.compute_seconds * self.compute)

    def cluster(self, cluster: Cluster) -> Cluster:
        def changed(level: Level | None) -> Level | None:
            return level and Level(
                level.latency_seconds * self.latency, level.seconds_per_byte / self.rate
            )

        links = Links(changed(cluster.links.intra), changed(cluster.links.inter))
        return replace(cluster, links=links)


CHANGES = (
    Change("latencies × 2", latency=2.0),
    Change("latencies × 1/3 (NCCL's LL protocol)", latency=1 / 3),
    Change("link rates × 0.6", rate=0.6),
    Change("GPU 1.5 times as fast", compute=1 / 1.5),
)

_P40 = (
    "8 P40 per node, 100 Gbit/s RoCE v2 [S]; PCIe 3.0 × 16 inside [assumed]",
    "218 images/s per P40 in mixed precision, at 64 images [M]; gradients in FP16 [S]",
    "their algorithms: flat ring, or reduce, ring among masters, broadcast [S]; a group is a node",
    "fusion threshold: chosen by the model; the paper fused into two segments [S]",
)
P40_CASE = Case(
    "ResNet-50, 1,024 P40, 64 images each",
    "ResNet-50",
    torch.float16,
    64,
    218.0,
    1024,
    8,
    ("pcie3", "roce100"),
    _P40,
    lambda: (Rule("ring"), Rule("paper")),
)


@dataclass(frozen=True)
class SpeedUp:
    """A published speed-up at 1,024 P40 over an unfused flat ring."""

    name: str
    published: float
    case: Case

    def run(self, change: Change | None = None) -> tuple[float, float]:
        """Predict the speed-up of whole steps, and of the all-reduces alone."""
        step, cluster = self.case.profile(), self.case.cluster()
        if change is not None:
            step, cluster = change.profile(step), change.cluster(cluster)
        ours = self.case.run(change)
        theirs = simulate(step, cluster, Plan.single("ring", fusion_threshold_bytes=1))
        return (
            theirs.step_seconds / ours.step_seconds,
            theirs.communication_seconds / ours.communication_seconds,
        )


SPEED_UPS = (
    SpeedUp("ResNet-50", 11.0, P40_CASE),
    SpeedUp(
        "AlexNet-BN",
        3.0,
        replace(
            P40_CASE,
            name="AlexNet-BN, 1,024 P40, 64 images each",
            model="AlexNet-BN",
            rate=495.0,
            fixed=(
                *_P40[:1],
                "495 images/s per P40: the rate of the whole training in 4 min on 1,024 [C, M]",
                *_P40[2:],
            ),
        ),
    ),
)


def steps_of_the_paper(p: int, k: int) -> int:
    """Return the latency steps of the paper with groups of ``k``: 4(k - 1) + 2(p / k - 1)."""
    traffic = PaperForm().traffic(0, Topology.of(p, k))
    return traffic.intra_messages + traffic.inter_messages


def best_groups(p: int) -> tuple[int, list[int]]:
    """Return the fewest latency steps of the paper's algorithm, and the group sizes with them."""
    counts = {k: steps_of_the_paper(p, k) for k in range(1, p + 1) if p % k == 0}
    least = min(counts.values())
    return least, [k for k, count in counts.items() if count == least]
