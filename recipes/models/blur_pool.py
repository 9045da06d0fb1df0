"""ResNet-50 that blurs before it strides (Zhang 2019, arXiv:1904.11486), as in FFCV and Composer.

Their form differs from that of timm (``model.args.aa_layer``), which strides in the blur after the
activation: there the max pool and the 3 x 3 convolutions are blurred, and the shortcuts are not.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

_LEAST_CHANNELS = 16
_STEM_CHANNELS = 64


class Blur(nn.Module):
    """A 3 x 3 binomial filter of each channel, padded with zeros.

    Args:
        channels: Number of channels of the images, ``[n, channels, height, width]``.
        stride: Pixels from one output to the next.
    """

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        from timm.layers import BlurPool2d

        self.stride = stride
        self.register_buffer("filter", BlurPool2d(channels).filt, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the blurred images."""
        weight = self.get_buffer("filter")
        return F.conv2d(images, weight, stride=self.stride, padding=1, groups=len(weight))


def resnet50_blurpool(
    num_classes: int = 1000, *, max_pool: bool = False, **options: Any
) -> nn.Module:
    """Make timm's ResNet-50 with a blur before each strided convolution of 16 inputs or more.

    Those are the second convolution and the shortcut of the first block of stages 2 to 4.

    Args:
        num_classes: Number of outputs.
        max_pool: Whether the max pool also takes every pixel, and a blur strides after it, as in
            Composer; FFCV leaves it.
        options: Keyword arguments of timm's model.
    """
    import timm

    model: nn.Module = timm.create_model(
        "resnet50", pretrained=False, num_classes=num_classes, **options
    )
    for name, layer in [*model.named_modules()]:
        is_strided = isinstance(layer, nn.Conv2d) and max(layer.stride) > 1
        if is_strided and layer.in_channels >= _LEAST_CHANNELS:
            place, _, last = name.rpartition(".")
            blurred = nn.Sequential(Blur(layer.in_channels), layer)
            setattr(model.get_submodule(place), last, blurred)
    if max_pool:
        whole = nn.MaxPool2d(kernel_size=3, stride=1, padding=1)
        model.maxpool = nn.Sequential(whole, Blur(_STEM_CHANNELS, stride=2))
    return model
