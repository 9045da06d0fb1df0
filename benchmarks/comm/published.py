"""Jia et al.'s algorithm, and the models of published figures.

Scaling efficiencies are in scaling_points.py. The step counts and speed-ups that Jia et al. state
were predicted by this file in commit fbc1dde.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import timm
import torch
from torch import Tensor, nn
from torchvision.models import alexnet
from torchvision.models.segmentation import deeplabv3_resnet50

from largebatch.comm import ALGORITHMS, Profile, Topology, Traffic, estimate_profile
from largebatch.recipes.models.alexnet import AlexNetBN


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


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "ResNet-50": (lambda: timm.create_model("resnet50"), (224, 224)),
    "ResNet-101": (lambda: timm.create_model("resnet101"), (224, 224)),
    "Inception V3": (lambda: timm.create_model("inception_v3"), (299, 299)),
    "VGG-16": (lambda: timm.create_model("vgg16"), (224, 224)),
    "AlexNet": (alexnet, (224, 224)),
    "AlexNet-BN": (lambda: AlexNetBN(bn_after_pool5=True), (227, 227)),
    "DeepLabv3+": (lambda: deeplabv3_resnet50(weights=None, weights_backbone=None), (768, 1152)),
}


@cache
def profile(model: str, dtype: torch.dtype) -> Profile:
    """Estimate a profile with a step of one second, to be scaled."""
    make, size = MODELS[model]
    with torch.device("meta"):
        return estimate_profile(make(), [torch.empty(2, 3, *size)], 1.0, gradient_dtype=dtype)
