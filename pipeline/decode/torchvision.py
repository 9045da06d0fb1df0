"""Decoding with Pillow and transforming with torchvision.

This is the fallback where neither DALI nor nvImageCodec is installed, and the reference for the
pixels of their backends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .batch import Request
from .pillow import decode
from .threads import ThreadedBackend

if TYPE_CHECKING:
    from PIL import Image


class TorchvisionBackend(ThreadedBackend):
    """Decodes with Pillow and transforms with torchvision."""

    @property
    def version(self) -> str:
        """Versions of torchvision and of Pillow."""
        import PIL
        import torchvision

        return f"{torchvision.__version__}, Pillow {PIL.__version__}"

    def _region(self, request: Request, i: int) -> Image.Image:
        x, y, width, height = request.crop.region[i].tolist()
        return decode(request.contents[i]).crop((x, y, x + width, y + height))

    def _levels(self, request: Request, i: int) -> NDArray[np.uint8]:
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as F

        crop, size = request.crop, request.image_size
        (width, height), (left, top) = crop.resized[i].tolist(), crop.corner[i].tolist()
        interpolation = InterpolationMode(self._interpolation)
        image = F.resize(self._region(request, i), [height, width], interpolation)
        image = F.crop(image, top, left, size, size)
        return np.asarray(F.horizontal_flip(image) if crop.mirrored[i] else image)
