"""Outputs of a model for random images, by which what was written is compared with the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def random_images(count: int, size: int) -> Tensor:
    """Random images, FP32, shape ``[count, 3, size, size]``; the same at each call."""
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def outputs_of(model: nn.Module, size: int) -> int:
    """Number of outputs of a model for one image of ``size`` x ``size`` pixels."""
    return int(model(random_images(1, size)).shape[-1])
