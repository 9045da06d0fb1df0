"""Decoding with Pillow: the reference for pixels, and for whether an image is usable.

A ValueError says why an image cannot be decoded.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..sources import Encoded
from .segments import without_metadata

if TYPE_CHECKING:
    from PIL import Image, ImageFile

#: Formats that Pillow may open. Its others are never tried: for EPS it would start Ghostscript.
#: MPO, a JPEG file followed by more, is opened as JPEG.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF")
#: The EXIF tag of the orientation.
ORIENTATION = 0x0112
_SIXTEEN_BITS = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_Result = TypeVar("_Result")


def open_image(content: bytes | memoryview) -> ImageFile.ImageFile:
    """Open an encoded image of one of :data:`FORMATS`; Pillow raises many kinds of exceptions."""
    from PIL import Image

    return Image.open(io.BytesIO(content), formats=FORMATS)


def decode(content: Encoded) -> Image.Image:
    """Decode an image, of several frames the first, to 8-bit RGB without its EXIF orientation."""
    return with_image(content, as_rgb)


def check_header(content: Encoded) -> None:
    """Check that Pillow can open an image, and the checksums of PNG; decode no pixels."""
    with_image(content, lambda image: image.verify())


def with_image(content: Encoded, use: Callable[[ImageFile.ImageFile], _Result]) -> _Result:
    """Return what ``use`` makes of an image; where Pillow fails, of the image without metadata."""
    if not content.size:
        raise ValueError("it is empty")

    def attempt(encoded: Encoded) -> _Result:
        try:
            with open_image(encoded.data) as image:
                return use(image)
        except Exception as error:  # Pillow's decoders raise many kinds of exceptions
            raise ValueError(reason(error)) from error

    try:
        return attempt(content)
    except ValueError:
        bare = without_metadata(content)
        if len(bare) == len(content):
            raise
    return attempt(bare)


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert an image that Pillow has opened to 8-bit RGB, which decodes it."""
    from PIL import Image

    if image.mode in _SIXTEEN_BITS:
        # Pillow would clip to 255, which turns nearly all pixels white.
        levels = np.asarray(image).astype(np.float64) / 257
        return Image.fromarray(np.rint(levels).clip(0, 255).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def orientation(image: Image.Image) -> int | None:
    """Return the EXIF orientation, 1 to 8; None if there is none or it is not valid."""
    try:
        found = image.getexif().get(ORIENTATION)
    except Exception:  # Pillow's parsers of metadata raise many kinds of exceptions
        return None
    return found if type(found) is int and 1 <= found <= 8 else None


def encode(image: Image.Image, form: str, **options: Any) -> bytes:
    """Return the content of the file that Pillow writes of an image, with its options."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def as_png(content: Encoded) -> Encoded:
    """Convert an image to PNG, which every decoder reads, without loss."""
    return np.frombuffer(encode(decode(content), "PNG", compress_level=1), dtype=np.uint8)


def reason(error: Any) -> str:
    """Return the text of a decoding error, without the address of the buffer."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return f"it is in none of the formats {', '.join(FORMATS)}"
    return str(error) or type(error).__name__
