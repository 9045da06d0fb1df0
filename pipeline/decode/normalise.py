"""Normalisation of 8-bit images, on decoding threads or on the GPU that they were copied to.

Both multiply and then add in FP32, and so give the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .batch import MemoryLayout
from .crops import Transform


class Normalisation:
    """Subtracts the transform's mean of each channel and divides by its standard deviation."""

    def __init__(self, transform: Transform, layout: MemoryLayout) -> None:
        std = np.array(transform.std)
        self._scale = (1 / (255 * std)).astype(np.float32)
        self._shift = (-np.array(transform.mean) / std).astype(np.float32)
        self._layout = layout
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def into(self, target: Tensor, levels: NDArray[np.uint8]) -> None:
        """Write one image, ``[height, width, 3]``, to a CPU tensor ``[3, height, width]``.

        NumPy is used, since torch would start a team of OpenMP threads in each decoding thread.
        """
        height, width, _ = levels.shape
        source: NDArray[np.uint8]
        if self._layout.memory_format is torch.channels_last:
            # The three channels of all pixels of a row are one dimension, which is long enough for
            # vector instructions.
            place = target.permute(1, 2, 0).numpy().reshape(height, 3 * width)
            source = levels.reshape(height, 3 * width)
            scale, shift = np.tile(self._scale, width), np.tile(self._shift, width)
        else:
            place, source = target.numpy(), levels.transpose(2, 0, 1)
            scale, shift = self._scale[:, None, None], self._shift[:, None, None]
        values = place if place.dtype == np.float32 else np.empty(place.shape, np.float32)
        np.copyto(values, source)
        np.multiply(values, scale, out=values)
        np.add(values, shift, out=values)
        if values is not place:
            np.copyto(place, values, casting="same_kind")

    def batch(self, levels: Tensor) -> Tensor:
        """Return the normalised form of uint8 images on any device, ``[n, 3, height, width]``."""
        if levels.device not in self._on_device:
            factors = (torch.from_numpy(f[:, None, None]) for f in (self._scale, self._shift))
            scale, shift = (factor.to(levels.device) for factor in factors)
            self._on_device[levels.device] = scale, shift
        scale, shift = self._on_device[levels.device]
        values = levels.to(torch.float32, memory_format=self._layout.memory_format)
        return values.mul_(scale).add_(shift).to(self._layout.dtype)
