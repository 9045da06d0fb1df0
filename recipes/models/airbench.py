"""Airbench's network, which reaches 94 % on CIFAR-10 in few epochs.

Source: Keller Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single A100" (2024, arXiv 2404.00498),
sections 3.1 to 3.3: a frozen first layer that whitens patches of the training images, and
convolutions that start as the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PATCH = 2  # side of the whitened patches
#: Added to the eigenvalues, so that directions with little variance are not blown up.
_EPS = 5e-4
_LOGIT_SCALE = 1 / 9
_NORM_EPS = 1e-12
#: Images of which patches are taken at once, as these need 4 times the memory of the images.
_IMAGES = 250


class Airbench(nn.Module):
    """Airbench's network: ``[N, 3, H, W]`` to logits ``[N, num_classes]``.

    A convolution of 2 x 2 pixels that whitens, three blocks of two convolutions with pooling
    between them, and a classifier without bias on the maximum over all pixels. Norm layers have a
    bias and no weight. :meth:`init_from_images` sets the weights of the first layer, which are not
    trained.

    Differences from the source: pooling at the end is over images of any size, and the bias of the
    first layer is trained in all epochs. The source trains biases with 64 times the learning rate
    of the other weights, which ``optimizer.bias_lr_scale`` does here.

    Args:
        num_classes: Number of outputs.
        widths: Channels of the three blocks. With 10 classes, the default, which is the source's,
            has 1.97 M parameters.
        bn_momentum: Weight of a batch in the running statistics of batch norm.

    Raises:
        ValueError: ``widths`` are not three positive numbers.
    """

    #: Whether the model has to be initialized from images (``init.images``).
    needs_images = True

    def __init__(
        self,
        num_classes: int = 10,
        *,
        widths: Sequence[int] = (64, 256, 256),
        bn_momentum: float = 0.4,
    ) -> None:
        super().__init__()
        if len(widths) != 3 or min(widths) < 1:
            raise ValueError(f"widths {list(widths)}; valid: three positive numbers")
        directions = 3 * _PATCH**2
        self.whiten = nn.Conv2d(3, 2 * directions, _PATCH)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        inputs = (2 * directions, *widths)
        self.blocks = nn.Sequential(
            *(Block(before, after, bn_momentum) for before, after in pairwise(inputs))
        )
        self.fc = nn.Linear(widths[-1], num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.blocks(F.gelu(self.whiten(images)))
        logits: Tensor = self.fc(maps.amax(dim=(2, 3))) * _LOGIT_SCALE
        return logits

    @torch.no_grad()
    def init_from_images(self, images: Tensor) -> None:
        """Set the first layer so that its outputs have unit variance and no correlation.

        The filters are the eigenvectors of the covariance of patches, each divided by the root of
        its eigenvalue, and their negatives, for the activation that follows.

        Args:
            images: Training images as the model gets them, FP32, shape ``[N, 3, H, W]``.
        """
        size, count = 3 * _PATCH**2, 0
        products = torch.zeros(size, size, dtype=torch.float64, device=images.device)
        for part in images.split(_IMAGES):
            patches = F.unfold(part.double(), _PATCH).transpose(1, 2).flatten(0, 1)
            products += patches.T @ patches
            count += len(patches)
        values, vectors = torch.linalg.eigh(products / count)
        filters = vectors.T / (values + _EPS).sqrt()[:, None]
        filters = filters.flip(0).view(-1, 3, _PATCH, _PATCH)  # the largest eigenvalue first
        self.whiten.weight.copy_(torch.cat([filters, -filters]))


class Block(nn.Module):
    """Two convolutions, each with batch norm and GELU; the first one is followed by pooling."""

    def __init__(self, inputs: int, outputs: int, bn_momentum: float) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(inputs, outputs), _norm(outputs, bn_momentum)
        self.conv2, self.norm2 = _convolution(outputs, outputs), _norm(outputs, bn_momentum)

    def forward(self, maps: Tensor) -> Tensor:
        maps = F.gelu(self.norm1(F.max_pool2d(self.conv1(maps), 2)))
        return F.gelu(self.norm2(self.conv2(maps)))


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight[:inputs])  # the others keep torch's random initialization
    return layer


def _norm(channels: int, momentum: float) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=_NORM_EPS, momentum=momentum)
    norm.weight.requires_grad_(False)
    return norm
