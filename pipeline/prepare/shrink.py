"""Resizing of encoded images."""

from __future__ import annotations

import io

import numpy as np

from ..decode.pillow import decode, reason

_ORIENTATION = 0x0112


def shrink(content: bytes, side: int, quality: int) -> bytes | None:
    """Resize an image so that its shorter side is ``side``; None if it is not longer than that.

    The image is resampled with Pillow's antialiased bicubic filter and encoded as JPEG. Grey images
    stay grey, all others become 8-bit RGB with 4:2:0 chroma subsampling, as in ImageNet. The EXIF
    orientation is kept, so that other programs still rotate the image; other metadata, such as the
    colour profile, are dropped.

    Args:
        content: The encoded image.
        side: Length of the shorter side in pixels.
        quality: JPEG quality, 1 to 100.

    Raises:
        ValueError: The image cannot be decoded; the message says why.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            shorter = min(width, height)
            if shorter <= side:
                return None
            orientation = image.getexif().get(_ORIENTATION)
            size = (round(width * side / shorter), round(height * side / shorter))
            whole = image.convert("L") if image.mode in ("1", "L") else None
        if whole is None:
            whole = decode(np.frombuffer(content, np.uint8))
        small = whole.resize(size, Image.Resampling.BICUBIC)
        exif = Image.Exif()
        if orientation is not None:
            exif[_ORIENTATION] = orientation
        out = io.BytesIO()
        small.save(out, "JPEG", quality=quality, **({"exif": exif} if orientation else {}))
    except Exception as error:  # Pillow's decoders raise many kinds of exceptions
        raise ValueError(reason(error)) from error
    return out.getvalue()
