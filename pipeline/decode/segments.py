"""The segments of JPEG files and the chunks of PNG files, and images without those of metadata.

ITU-T T.81, B.1.1 and table B.1 (JPEG), and the PNG specification, 5.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..sources import Encoded

START_OF_SCAN, END_MARKER = 0xDA, 0xD9
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xDA)})
# APP0 (JFIF) and APP14 (Adobe) say how colours are stored.
_JPEG_METADATA = frozenset({0xFE, *range(0xE1, 0xEE), 0xEF})
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_FRAME = 12  # bytes of length, type and checksum of a chunk


def is_jpeg(content: Encoded) -> bool:
    """Whether the content starts as a JPEG file."""
    return content[:3].tobytes() == b"\xff\xd8\xff"


def is_png(content: Encoded) -> bool:
    """Whether the content starts as a PNG file."""
    return content[:8].tobytes() == _PNG_SIGNATURE


def segments(content: Encoded) -> Iterator[tuple[int, int, int]]:
    """Yield marker, begin and end of the content of each whole segment of a JPEG file, in order."""
    data = content.data
    at, ends = 2, None
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != END_MARKER:
        marker = data[at + 1]
        if marker == 0xFF:  # fill bytes may precede a marker
            at += 1
            continue
        if marker in _WITHOUT_LENGTH:
            at += 2
            continue
        begin, at = at + 4, at + 2 + (data[at + 2] << 8 | data[at + 3])
        if at > len(data):
            return
        yield marker, begin, at
        if marker == START_OF_SCAN:  # its pixels follow
            ends = markers(content) if ends is None else ends
            later = ends[np.searchsorted(ends, at) :]
            at = int(later[0]) if len(later) else len(data)


def markers(content: Encoded) -> NDArray[np.intp]:
    """Return the positions of markers that may end the pixels of a scan, in order."""
    at = np.flatnonzero(content[:-1] == 0xFF)
    after = content[at + 1]
    restarts = (after >= 0xD0) & (after <= 0xD7)
    found: NDArray[np.intp] = at[(after != 0) & (after != 0xFF) & ~restarts]
    return found


def chunks(content: Encoded) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, begin and end of each chunk of a PNG file with its frame, in order."""
    data, at = content.data, len(_PNG_SIGNATURE)
    while at + _PNG_FRAME <= len(data):
        begin, at = at, at + _PNG_FRAME + int.from_bytes(data[at : at + 4])
        yield bytes(data[begin + 4 : begin + 8]), begin, at


def without_metadata(content: Encoded) -> Encoded:
    """Return a JPEG or PNG file with the same pixels and without metadata; others as they are.

    Removed are comments and all application segments but JFIF's and Adobe's of JPEG files, and all
    ancillary chunks of PNG files: transparency too, which is not used.
    """
    keep = np.ones(content.size, bool)
    if is_jpeg(content):
        for marker, begin, end in segments(content):
            if marker == START_OF_SCAN:
                break
            keep[begin - 4 : end] = marker not in _JPEG_METADATA
    elif is_png(content):
        for kind, begin, end in chunks(content):
            keep[begin:end] = kind[:1].isupper()
    return content[keep]
