"""The images that a data set is made of, wherever they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError

_SIGNATURES = (
    b"\xff\xd8\xff",  # JPEG
    b"\x89PNG\r\n\x1a\n",
    b"BM",
    b"GIF8",
    b"II*\0",  # TIFF
    b"MM\0*",
)
#: Bytes that :func:`begins_as_image` looks at.
SIGNATURE_BYTES = 12


@dataclass(frozen=True, eq=False)
class Images:
    """The images of one split, in order.

    Attributes:
        split: ``train`` or ``val``.
        classes: their names, by number.
        names: ``class/file`` of each image.
        labels: class numbers, int64, shape ``[images]``.
        sizes: of the encoded images in bytes, int64, shape ``[images]``; an estimate where they
            are encoded when they are read.
        read: gives the encoded image of a number; called from several threads at once. It raises
            :class:`DataError` where it cannot be read.

    Raises:
        DataError: an index of shards cannot hold a name.
    """

    split: str
    classes: tuple[str, ...]
    names: list[str]
    labels: NDArray[np.int64]
    sizes: NDArray[np.int64]
    read: Callable[[int], bytes]

    def __post_init__(self) -> None:
        for name in (*self.classes, *self.names):
            if "\n" in name:
                raise DataError(f"the name {name!r} has a line break in it: rename it")
            try:
                name.encode()
            except UnicodeEncodeError:
                raise DataError(f"the name {name!r} is not UTF-8: rename it") from None

    def __len__(self) -> int:
        return len(self.names)

    def fingerprint(self) -> str:
        """A hash of all but the contents of images."""
        text = "\n".join([*self.classes, "", *self.names]).encode()
        numbers = np.stack([self.labels, self.sizes]).astype("<i8").tobytes()
        return hashlib.sha256(text + numbers).hexdigest()[:16]


def begins_as_image(content: bytes) -> bool:
    """Whether it begins as a file of one of the common formats does."""
    return content.startswith(_SIGNATURES) or (
        content.startswith(b"RIFF") and content[8:12] == b"WEBP"
    )
