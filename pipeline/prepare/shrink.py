"""Resizing of encoded images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..decode.pillow import ORIENTATION, as_rgb, encode, orientation, with_image

if TYPE_CHECKING:
    from PIL import Image


def shrink(content: bytes, side: int, quality: int) -> bytes | None:
    """Resize an image so that its shorter side is ``side``; None if it is not longer than that.

    The image is resampled with Pillow's antialiased bicubic filter and encoded as JPEG. Grey images
    stay grey, all others become 8-bit RGB with 4:2:0 chroma subsampling, as in ImageNet. A valid
    EXIF orientation is kept, so that other programs still rotate the image; other metadata, such as
    the colour profile, are dropped, and none of it decides whether the image is usable.
    """
    from PIL import Image

    def smaller(image: Image.Image) -> bytes | None:
        width, height = image.size
        shorter = min(width, height)
        if shorter <= side:
            return None
        size = (round(width * side / shorter), round(height * side / shorter))
        whole = image.convert("L") if image.mode in ("1", "L") else as_rgb(image)
        exif = Image.Exif()
        if (turned := orientation(image)) is not None:
            exif[ORIENTATION] = turned
        small = whole.resize(size, Image.Resampling.BICUBIC)
        small.info.clear()  # Pillow would store its comment
        return encode(small, "JPEG", quality=quality, **({"exif": exif} if turned else {}))

    return with_image(np.frombuffer(content, np.uint8), smaller)
