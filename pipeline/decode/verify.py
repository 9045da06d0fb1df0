"""Strict verification: damage to images that decoders pass over in silence.

libjpeg decodes a damaged JPEG file as far as it can, fills the rest with grey, and emits a warning.
Pillow drops it, and DALI prints it without the name of the file. simplejpeg, on libjpeg-turbo's own
interface, raises it; at an eighth of the size it still decodes every bit of the file, and computes
little else. libjpeg itself does not notice that scans are missing before the end marker.

What remains unseen is damage that leaves a valid file: most single flipped bits in the pixels of a
JPEG file change them to other valid ones (docs/results/damaged-images.md).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..sources import Encoded
from .header import (
    END_OF_IMAGE,
    end_of_only_scan,
    misses_scans,
    needs_reference,
    with_half_contrast,
)
from .pillow import check_header, decode
from .segments import is_jpeg


def verify(content: Encoded) -> None:
    """Check that an image can be decoded and has no :func:`damage`; ValueError says why not."""
    try:
        if is_jpeg(content):
            check_header(content)  # the rest is decoded by ``damage``
        else:
            decode(content)
    except ValueError as error:
        raise ValueError(f"cannot be decoded: {error}") from error
    if found := damage(content):
        raise ValueError(f"is damaged: {found}")


def damage(content: Encoded) -> str | None:
    """Return the damage to an image of which Pillow can read the header; None if none is found.

    - JPEG: libjpeg's first warning or error, in its words; blocks brighter than white or darker
      than black; bytes that the pixels do not need; missing scans.
    - PNG: wrong checksums or a missing end.
    """
    if is_jpeg(content):
        return _jpeg_damage(content)
    try:
        check_header(content)
    except ValueError as error:
        return str(error)
    return None


def _jpeg_damage(content: Encoded) -> str | None:
    darker, most = with_half_contrast(content)
    try:
        grey = _eighth(darker)
    except ValueError as error:
        if "subsampling" not in str(error):
            return str(error)
        try:  # TurboJPEG does not know it
            decode(content)
        except ValueError as wrong:
            return str(wrong)
    else:
        if not needs_reference(content) and np.abs(grey.astype(int) - 128).max() > most:
            return "parts of its picture are brighter than white or darker than black"
        if _leaves_bytes(content):
            return "bytes follow its pixels"
    return "scans are missing before its end marker" if misses_scans(content) else None


def _eighth(content: Encoded) -> NDArray[np.uint8]:
    """Decode a JPEG file to grey at an eighth of its size; libjpeg's warnings are ValueErrors."""
    from simplejpeg import decode_jpeg

    options = {"fastdct": True, "fastupsample": True, "min_height": 1, "min_width": 1}
    grey: NDArray[np.uint8] = decode_jpeg(content, "GRAY", **options)
    return grey


def _leaves_bytes(content: Encoded) -> bool:
    """Whether an only scan is complete without its last byte; libjpeg reads up to eight ahead."""
    end = end_of_only_scan(content)
    if end is None:
        return False
    stuffed = content[end - 2 : end].tobytes() == b"\xff\0"
    try:
        _eighth(np.append(content[: end - 1 - stuffed], np.frombuffer(END_OF_IMAGE, np.uint8)))
    except ValueError:
        return False
    return True
