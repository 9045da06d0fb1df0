"""Format, size and colour mode of an encoded image, found by decoding it with Pillow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..decode.pillow import orientation, with_image
from ..decode.verify import damage
from ..sources import Encoded

if TYPE_CHECKING:
    from PIL import ImageFile

_MODES = {
    "1": "black and white",
    "L": "grey",
    "LA": "grey, alpha",
    "P": "palette",
    "PA": "palette, alpha",
    "RGBA": "RGB, alpha",
    "I;16": "16-bit grey",
    "I;16B": "16-bit grey",
    "I": "32-bit grey",
    "F": "float grey",
}
_PNG_BIT_DEPTH_AT = 24
_YCCK = 2
#: The format that an extension says.
FORMAT_OF = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "bmp": "BMP", "webp": "WEBP"}
#: Kinds of images that every decoder decodes to the same colours.
PLAIN_KINDS = frozenset({"JPEG RGB", "JPEG grey", "PNG RGB", "PNG grey", "BMP RGB", "WEBP RGB"})


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """Facts about a decoded image."""

    width: int  # in pixels, as stored
    height: int
    format: str  # such as "JPEG"
    kind: str  # format, colour mode and what is unusual: "PNG 16-bit RGB", "WEBP RGB, animated"
    turned: bool  # whether the EXIF orientation asks for rotation or mirroring
    damage: str | None  # that Pillow passes over


def examine(content: Encoded) -> ImageInfo:
    """Decode an image and return its facts, or raise ValueError with the reason."""

    def facts(image: ImageFile.ImageFile) -> ImageInfo:
        width, height = image.size
        # MPO is a JPEG file followed by more pictures, as some cameras write.
        name = "JPEG" if image.format == "MPO" else str(image.format)
        kind = f"{name} {_colours(image, name, content)}"
        if name != "JPEG" and getattr(image, "is_animated", False):
            kind += ", animated"
        image.load()
        turned = orientation(image) not in (None, 1)  # which is upright
        return ImageInfo(width, height, name, kind, turned, damage(content))

    return with_image(content, facts)


def _colours(image: ImageFile.ImageFile, name: str, content: Encoded) -> str:
    if name == "JPEG" and image.mode == "CMYK" and image.info.get("adobe_transform") == _YCCK:
        return "YCCK"
    colours = _MODES.get(image.mode, image.mode)
    # Pillow converts 16-bit colour to 8 bits, so the bit depth is read from the header.
    deep = name == "PNG" and content[_PNG_BIT_DEPTH_AT] == 16 and not colours.startswith("16-bit")
    return f"16-bit {colours}" if deep else colours
