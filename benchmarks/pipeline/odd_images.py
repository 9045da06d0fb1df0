"""Unusual and damaged images, as found in data sets, to hold the loader to.

tests/pipeline/decode/test_bad_images.py reads each of them with each back end.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

GOOD = 12


def encode(image: Image.Image, form: str, **options: object) -> bytes:
    """Encode an image in the format ``form``."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def picture(width: int = 80, height: int = 60, seed: int = 0) -> Image.Image:
    """Return a smooth random image in RGB."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def _exif_rotated() -> bytes:
    exif = Image.Exif()
    exif[0x112] = 6
    return encode(picture(), "JPEG", quality=92, exif=exif)


def _sixteen_bits() -> bytes:
    levels = np.asarray(picture().convert("L")).astype(np.uint16) * 257
    return encode(Image.fromarray(levels), "PNG")


def _jpeg() -> bytes:
    return encode(picture(), "JPEG", quality=92)


#: Unusual images that can be used: the content of the file ``05odd.JPEG``.
USABLE: dict[str, Callable[[], bytes]] = {
    "CMYK JPEG": lambda: encode(picture().convert("CMYK"), "JPEG", quality=92),
    "grey JPEG": lambda: encode(picture().convert("L"), "JPEG", quality=92),
    "progressive JPEG": lambda: encode(picture(), "JPEG", quality=92, progressive=True),
    "JPEG rotated by EXIF": _exif_rotated,
    "JPEG with bytes after its end": lambda: _jpeg() + b"\0" * 17,
    "PNG named JPEG": lambda: encode(picture(), "PNG"),
    "GIF named JPEG": lambda: encode(picture(), "GIF"),
    "WebP named JPEG": lambda: encode(picture(), "WEBP", lossless=True),
    "PNG with transparency": lambda: encode(picture().convert("RGBA"), "PNG"),
    "PNG with a palette": lambda: encode(picture().convert("P"), "PNG"),
    "16-bit grey PNG": _sixteen_bits,
    "1 × 1 pixel": lambda: encode(picture(1, 1), "JPEG"),
    "2,000 × 3 pixels": lambda: encode(picture(2000, 3), "JPEG"),
}

#: Images that cannot be used; None stands for a directory.
UNUSABLE: dict[str, Callable[[], bytes | None]] = {
    "empty": lambda: b"",
    "a web page": lambda: b"<html>404 not found</html>",
    "JPEG truncated in the middle": lambda: _jpeg()[: len(_jpeg()) // 2],
    "JPEG without its last 2 bytes": lambda: _jpeg()[:-2],
    "JPEG with only its header": lambda: _jpeg()[:300],
    "PNG truncated in the middle": lambda: encode(picture(), "PNG")[:2000],
    "PNG with damaged data": lambda: _damaged(encode(picture(), "PNG")),
    "a directory": lambda: None,
}


def _damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return (
        content[:middle]
        + bytes(255 - b for b in content[middle : middle + 40])
        + content[middle + 40 :]
    )


def write_folder(root: Path, content: bytes | None) -> Path:
    """Write a data set of one class, train and val, that includes the unusual image."""
    for split in ("train", "val"):
        folder = root / split / "class"
        folder.mkdir(parents=True)
        for i in range(GOOD):
            (folder / f"{i:02d}.JPEG").write_bytes(encode(picture(seed=i + 1), "JPEG"))
        odd = folder / "05odd.JPEG"
        if content is None:
            odd.mkdir()
        else:
            odd.write_bytes(content)
    return root / "train" / "class" / "05odd.JPEG"
