"""ResNet-9, a small residual network that trains fast on CIFAR-10.

Source: David Page, "How to Train Your ResNet" (myrtle.ai, 2018), the network of its DAWNBench
entries: eight convolutions and a classifier, residual blocks after the second and the fourth group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResNet9(nn.Module):
    """ResNet-9: ``[N, 3, H, W]`` to logits ``[N, num_classes]``.

    Differences from the source: ReLU; global average pooling instead of max pooling, without a
    factor on the logits; widths of 16 or 32 besides 64, for CPUs; and a stride of the first
    convolution.

    Args:
        num_classes: Number of outputs.
        width: Channels after the first convolution; later layers have 2, 4 and 8 times as many.
            With 10 classes, width 16 has 0.41 M parameters, 32 has 1.65 M, 64 has 6.57 M.
        stem_stride: Stride of the first convolution. 2 needs a quarter of the operations of 1.
        zero_init_last: Whether the residual blocks start as the identity, as their last norm layer
            has gamma 0 (Goyal et al. 2017, arXiv 1706.02677, section 5.1).
    """

    def __init__(
        self,
        num_classes: int = 10,
        *,
        width: int = 64,
        stem_stride: int = 1,
        zero_init_last: bool = True,
    ) -> None:
        super().__init__()
        self.stem = _layer(3, width, stride=stem_stride)
        self.layer1 = nn.Sequential(_layer(width, 2 * width), _pool(), Block(2 * width))
        self.layer2 = nn.Sequential(_layer(2 * width, 4 * width), _pool())
        self.layer3 = nn.Sequential(_layer(4 * width, 8 * width), _pool(), Block(8 * width))
        self.fc = nn.Linear(8 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            elif isinstance(module, Block) and zero_init_last:
                nn.init.zeros_(module.bn2.weight)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.layer3(self.layer2(self.layer1(self.stem(images))))
        logits: Tensor = self.fc(maps.mean(dim=(2, 3)))
        return logits


class Block(nn.Module):
    """A residual block of two convolutions, with the layer names of timm and torchvision."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(channels, channels), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = _convolution(channels, channels), nn.BatchNorm2d(channels)
        self.downsample = None

    def forward(self, maps: Tensor) -> Tensor:
        branch = torch.relu(self.bn1(self.conv1(maps)))
        return torch.relu(maps + self.bn2(self.conv2(branch)))


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


def _layer(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    norm = nn.BatchNorm2d(outputs)
    return nn.Sequential(_convolution(inputs, outputs, stride), norm, nn.ReLU(inplace=True))


def _pool() -> nn.MaxPool2d:
    # Rounded up, so that images of 24 pixels are still 2 x 2 after the last pooling.
    return nn.MaxPool2d(2, ceil_mode=True)
