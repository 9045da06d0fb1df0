"""Strict verification: damage to images that decoders pass over in silence.

libjpeg decodes a damaged JPEG file as far as it can, fills the rest with grey, and emits a warning.
Pillow drops it, and DALI prints it without the name of the file. simplejpeg, on libjpeg-turbo's own
interface, raises it; at an eighth of the size it still decodes every bit of the file, and computes
little else. libjpeg itself does not notice that scans are missing before the end marker.

What remains unseen is damage that leaves a valid file: most single flipped bits in the pixels of a
JPEG file change them to other valid ones (docs/results/damaged-images.md).
"""

from __future__ import annotations

from ..sources import Encoded
from .header import JPEG_SIGNATURE, misses_scans
from .pillow import check_header, decode
from .png import SIGNATURE as PNG_SIGNATURE
from .png import png_damage


def verify(content: Encoded) -> None:
    """Check an image before any backend decodes it.

    It must be decodable, a JPEG file by libjpeg-turbo and another by Pillow, and have no damage
    (:func:`damage`).

    Raises:
        ValueError: The image cannot be used; the message says why.
    """
    try:
        if _is_jpeg(content):
            check_header(content)  # the rest is decoded by ``damage``
        else:
            decode(content)
    except ValueError as error:
        raise ValueError(f"cannot be decoded: {error}") from error
    if found := damage(content):
        raise ValueError(f"is damaged: {found}")


def damage(content: Encoded) -> str | None:
    """Return the damage to an image of which Pillow can read the header; None if none is found.

    - JPEG: libjpeg's first warning or error, in its words, or missing scans.
    - PNG: wrong checksums, missing pixels or a missing end.
    - Of other formats nothing is known.
    """
    if _is_jpeg(content):
        return _jpeg_damage(content)
    if content[: len(PNG_SIGNATURE)].tobytes() == PNG_SIGNATURE:
        return png_damage(content)
    return None


def _is_jpeg(content: Encoded) -> bool:
    return content[: len(JPEG_SIGNATURE)].tobytes() == JPEG_SIGNATURE


def _jpeg_damage(content: Encoded) -> str | None:
    from simplejpeg import decode_jpeg

    try:
        decode_jpeg(content, "GRAY", fastdct=True, fastupsample=True, min_height=1, min_width=1)
    except ValueError as error:
        if "subsampling" in str(error):  # nearly always a damaged header
            return "its chroma subsampling is none that TurboJPEG knows, so it cannot be verified"
        return str(error)
    return "scans are missing before its end marker" if misses_scans(content) else None
