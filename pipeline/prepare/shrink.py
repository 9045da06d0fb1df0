"""Make an encoded image smaller."""

from __future__ import annotations

import io

import numpy as np

from ..decode.pillow import decode, reason

_ORIENTATION = 0x0112


def shrink(content: bytes, side: int, quality: int) -> bytes | None:
    """An image whose shorter side is ``side``, or None where it is no longer than that already.

    It is resampled with Pillow's antialiased bicubic filter and encoded as JPEG: grey stays grey,
    all else becomes RGB of 8 bits; colours are subsampled 4:2:0, as in ImageNet. Of its metadata
    the EXIF orientation is kept, which tells other programs how to turn it; the colour profile is
    not.

    Args:
        content: the encoded image.
        side: in pixels.
        quality: of JPEG, 1 to 100.

    Raises:
        ValueError: it cannot be decoded; the message says why.
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
    except Exception as error:  # Pillow's decoders raise what their formats make them raise
        raise ValueError(reason(error)) from error
    return out.getvalue()
