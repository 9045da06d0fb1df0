"""Decoding with Pillow: the reference of what an image shows, and the judge of what is none."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from ..sources import Encoded

if TYPE_CHECKING:
    from PIL import Image

_SIXTEEN_BITS = ("I", "I;16", "I;16B", "I;16L", "I;16N")


def decode(content: Encoded) -> Image.Image:
    """The image in RGB, 8 bits; EXIF orientation is not applied, and of several frames the first
    is taken.

    Raises:
        ValueError: it cannot be decoded; the message says why.
    """
    from PIL import Image

    if not content.size:
        raise ValueError("it is empty")
    try:
        with Image.open(io.BytesIO(content.data)) as image:
            if image.mode in _SIXTEEN_BITS:
                # Pillow would clip to 255, which makes nearly everything white.
                levels = np.asarray(image).astype(np.float64) / 257
                return Image.fromarray(np.rint(levels).clip(0, 255).astype(np.uint8)).convert("RGB")
            return image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise what their formats make them raise
        raise ValueError(reason(error)) from error


def as_png(content: Encoded) -> Encoded:
    """The image in a format that every decoder knows, without loss.

    Raises:
        ValueError: as of :func:`decode`.
    """
    file = io.BytesIO()
    decode(content).save(file, "PNG", compress_level=1)
    return np.frombuffer(file.getvalue(), dtype=np.uint8)


def reason(error: Any) -> str:
    """What is wrong with an image, without the address of the buffer that it was in."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "it is in no format of images that Pillow knows"
    return str(error) or type(error).__name__
