"""The images of a data set to be written, whatever their origin."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, printable
from ..sources import EXTENSIONS, is_image_name, is_inside

_SIGNATURES = (
    b"\xff\xd8\xff",  # JPEG
    b"\x89PNG\r\n\x1a\n",
    b"BM",
    b"GIF8",
    b"II*\0",  # TIFF
    b"MM\0*",
)


@dataclass(frozen=True, eq=False)
class Images:
    """The images of one split, in order.

    Attributes:
        split: ``train`` or ``val``.
        classes: Class names, by class number, with escapes for what cannot be printed
            (:func:`~largebatch.pipeline.errors.printable`).
        names: Name of each image, ``class/file``, with such escapes; they all differ.
        labels: Class numbers, int64, shape ``[images]``.
        sizes: Sizes of the encoded images in bytes, int64, shape ``[images]``; an estimate if
            images are encoded when they are read.
        read: Returns the encoded image with a given number; called from several threads at once.
            It raises :class:`DataError` if the image cannot be read.

    Raises:
        DataError: A name occurs twice, is not that of an image, or leads out of the data set.
    """

    split: str
    classes: tuple[str, ...]
    names: list[str]
    labels: NDArray[np.int64]
    sizes: NDArray[np.int64]
    read: Callable[[int], bytes]

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(map(printable, self.classes)))
        object.__setattr__(self, "names", list(map(printable, self.names)))
        for name in (*self.classes, *self.names):
            if not is_inside(name):  # it is written below the output folder
                raise DataError(
                    f"the name {name!r} leads out of the data set; valid: relative names "
                    "without '..'"
                )
        seen = set[str]()
        for name in self.names:
            if not is_image_name(name.rpartition("/")[2]):
                raise DataError(f"{name!r} is no image file; valid: {', '.join(EXTENSIONS)}")
            if name in seen:
                raise DataError(f"{self.split} holds {name!r} twice; valid: each image once")
            seen.add(name)

    def __len__(self) -> int:
        return len(self.names)

    def fingerprint(self) -> str:
        """Return a hash of everything but the contents of the images."""
        text = "\n".join([*self.classes, "", *self.names]).encode()
        numbers = np.stack([self.labels, self.sizes]).astype("<i8").tobytes()
        return hashlib.sha256(text + numbers).hexdigest()[:16]


def has_image_signature(content: bytes) -> bool:
    """Whether the content starts with the signature of a common image format."""
    return content.startswith(_SIGNATURES) or (
        content.startswith(b"RIFF") and content[8:12] == b"WEBP"
    )
