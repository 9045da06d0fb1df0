"""The size of an encoded image from its first bytes, without decoding it.

Every image that is trained on passes here once per epoch, before it is known how it will be cut,
so JPEG files are read by hand: Pillow takes ten times as long to open one. Pillow reads the rest.
The markers of JPEG are those of ITU T.81, table B.1.
"""

from __future__ import annotations

import io

from ..sources import Encoded
from .pillow import reason

_START_OF_IMAGE = b"\xff\xd8\xff"
# Start of frame, of all kinds of coding; C4, C8 and CC between them are tables.
_START_OF_FRAME = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xDA)})
_END_OF_IMAGE = b"\xff\xd9"


def image_size(content: Encoded) -> tuple[int, int]:
    """Width and height in pixels, as they are stored: EXIF orientation is not applied.

    Raises:
        ValueError: it is not an image that can be read; the message says why.
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
    except Exception as error:  # Pillow's decoders raise what their formats make them raise
        raise ValueError(reason(error)) from error


def is_whole_jpeg(content: Encoded) -> bool:
    """Whether it begins as a JPEG file does and ends as one that was not cut short.

    A few bytes may follow the end: cameras and editors leave some.
    """
    return content[:3].tobytes() == _START_OF_IMAGE and _END_OF_IMAGE in content[-64:].tobytes()


def _jpeg_size(content: Encoded) -> tuple[int, int] | None:
    """None where the file is odd in some way."""
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
        if marker == 0xFF:  # fill bytes may stand before a marker
            at += 1
        elif marker in _WITHOUT_LENGTH:
            at += 2
        else:
            at += 2 + (data[at + 2] << 8 | data[at + 3])
    return None
