"""Facts about an encoded image from its headers, without decoding it: size and completeness.

The size of every training image is needed once per epoch to place its crop. JPEG headers are
therefore parsed here, since Pillow takes ten times as long to open a file; Pillow opens all other
formats. The JPEG markers are those of ITU T.81, table B.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..sources import Encoded
from .pillow import open_image, reason

JPEG_SIGNATURE = b"\xff\xd8\xff"
# The start-of-frame markers; C4, C8 and CC in that range mean something else.
_START_OF_FRAME = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xDA)})
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_START_OF_SCAN, _END_MARKER = 0xDA, 0xD9
_COEFFICIENTS = 64
_END_OF_IMAGE = b"\xff\xd9"


def image_size(content: Encoded) -> tuple[int, int]:
    """Return width and height in pixels, as stored: the EXIF orientation is not applied.

    Raises:
        ValueError: The content is not a readable image; the message says why.
    """
    if content[:3].tobytes() == JPEG_SIGNATURE:
        size = _jpeg_size(content)
        if size is not None:
            return size
    if not content.size:
        raise ValueError("it is empty")
    try:
        with open_image(content.data) as image:
            return image.size
    except Exception as error:  # Pillow's decoders raise many kinds of exceptions
        raise ValueError(reason(error)) from error


def is_complete_jpeg(content: Encoded) -> bool:
    """Whether the content starts as a JPEG file and has its end marker, so is not truncated.

    A few bytes may follow the end marker: some cameras and editors write them.
    """
    return content[:3].tobytes() == JPEG_SIGNATURE and _END_OF_IMAGE in content[-64:].tobytes()


def _jpeg_size(content: Encoded) -> tuple[int, int] | None:
    """Return width and height, or None if the header is not of the usual form."""
    data = content.data
    end = len(data) - 9
    at = 2
    while at < end:
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker in _START_OF_FRAME:
            height = data[at + 5] << 8 | data[at + 6]
            width = data[at + 7] << 8 | data[at + 8]
            return (width, height) if width and height else None
        if marker == 0xFF:  # fill bytes may precede a marker
            at += 1
        elif marker in _WITHOUT_LENGTH:
            at += 2
        else:
            at += 2 + (data[at + 2] << 8 | data[at + 3])
    return None


def misses_scans(content: Encoded) -> bool:
    """Whether a valid JPEG file ends before it has sent all bits of all coefficients.

    This concerns files in several scans, nearly all of them progressive: cut between two scans and
    ended by an end marker, they are valid, and decode to a blurred or colourless picture.
    """
    data = content.data
    at = 2
    ends = None
    missing: dict[int, list[int]] = {}  # by component: bits of each coefficient not yet sent
    sequential = True
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _END_MARKER:
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker in _WITHOUT_LENGTH:
            at += 2
            continue
        body = at + 4
        at += 2 + (data[at + 2] << 8 | data[at + 3])
        if marker in _START_OF_FRAME:
            sequential = marker not in _PROGRESSIVE
            missing = {data[body + 6 + 3 * i]: [-1] * _COEFFICIENTS for i in range(data[body + 5])}
        elif marker == _START_OF_SCAN:
            count = data[body]
            if sequential and count == len(missing):
                return False
            first, last, bits = data[at - 3], data[at - 2], data[at - 1] & 15
            for i in range(count):
                of_component = missing[data[body + 1 + 2 * i]]
                of_component[first : last + 1] = [bits] * (last + 1 - first)
            if ends is None:
                ends = _markers(content)
            later = ends[np.searchsorted(ends, at) :]
            at = int(later[0]) if len(later) else len(data)
    return any(any(bits) for bits in missing.values())


def _markers(content: Encoded) -> NDArray[np.intp]:
    """Return the positions of markers that may end the pixels of a scan, in order."""
    at = np.flatnonzero(content[:-1] == 0xFF)
    after = content[at + 1]
    restarts = (after >= 0xD0) & (after <= 0xD7)
    found: NDArray[np.intp] = at[(after != 0) & (after != 0xFF) & ~restarts]
    return found
