"""The images of a data set to be written, whatever their origin."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, printable
from ..sources import EXTENSIONS, is_image_name
from ..sources.base import check_inside

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
    """The images of one split, in order; names get escapes for what cannot be printed."""

    split: str  # "train" or "val"
    classes: tuple[str, ...]  # by class number
    names: list[str]  # "class/file", by image
    labels: NDArray[np.int64]  # class numbers, by image
    sizes: NDArray[np.int64]  # bytes of each image; an estimate if it is encoded when it is read
    # Returns the encoded image of a number, or raises DataError; called from several threads.
    read: Callable[[int], bytes]
    # Returns the file of an image, to be linked to in place of a copy; None if they are in none.
    path: Callable[[int], str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(map(printable, self.classes)))
        object.__setattr__(self, "names", list(map(printable, self.names)))
        for name in (*self.classes, *self.names):
            check_inside(name, "the data set")  # it is written below the output folder
        seen = set[str]()
        for name in self.names:
            if not is_image_name(name.rpartition("/")[2]):
                raise DataError(f"{name!r} is no image file; valid: {', '.join(EXTENSIONS)}")
            if name in seen:
                raise DataError(f"{self.split} holds {name!r} twice; valid: each image once")
            seen.add(name)

    def __len__(self) -> int:
        return len(self.names)

    def part(self, split: str, numbers: NDArray[np.int64]) -> Images:
        """Return the images of these numbers as a split of its own, with the same classes."""
        read, path = self.read, self.path
        return Images(
            split,
            self.classes,
            [self.names[number] for number in numbers],
            self.labels[numbers],
            self.sizes[numbers],
            lambda number: read(int(numbers[number])),
            path and (lambda number: path(int(numbers[number]))),
        )

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
