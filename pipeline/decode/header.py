"""The size of an encoded image from its first bytes, without decoding it.

The size of every training image is needed once per epoch to place its crop. JPEG headers are
therefore parsed here, since Pillow takes ten times as long to open a file; Pillow opens all other
formats. The JPEG markers are those of ITU T.81, table B.1.
"""

from __future__ import annotations

import io

from ..sources import Encoded
from .pillow import reason

_START_OF_IMAGE = b"\xff\xd8\xff"
# The start-of-frame markers; C4, C8 and CC in that range mean something else.
_START_OF_FRAME = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xDA)})
_END_OF_IMAGE = b"\xff\xd9"


def image_size(content: Encoded) -> tuple[int, int]:
    """Return width and height in pixels, as stored: the EXIF orientation is not applied.

    Raises:
        ValueError: The content is not a readable image; the message says why.
    """
    if content[:3].tobytes() == _START_OF_IMAGE:
        size = _jpeg_size(content)
        if size is not None:
            return size
    from PIL import Image

    if not content.size:
        raise ValueError("it is empty")
    try:
        with Image.open(io.BytesIO(content.data)) as image:
            return image.size
    except Exception as error:  # Pillow's decoders raise many kinds of exceptions
        raise ValueError(reason(error)) from error


def is_complete_jpeg(content: Encoded) -> bool:
    """Whether the content starts as a JPEG file and has its end marker, so is not truncated.

    A few bytes may follow the end marker: some cameras and editors write them.
    """
    return content[:3].tobytes() == _START_OF_IMAGE and _END_OF_IMAGE in content[-64:].tobytes()


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
