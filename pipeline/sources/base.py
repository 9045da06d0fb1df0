"""The interface of sources: a numbered list of encoded images with labels."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError

#: The bytes of an encoded image, shape ``[bytes]``.
Encoded = NDArray[np.uint8]

#: File name extensions of images, in lower case.
EXTENSIONS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")

# Images in formats, or under names, that are not read.
_UNREAD = re.compile(
    r"\.(avif|dng|gif|hei[cf]|j2k|jfif|jif|jp[2efx]|jxl|p[bgnp]m|tga|tiff?)", re.IGNORECASE
)
# Names of folders of operating systems, network storage and archivers, and all that start with a
# dot.
_HIDDEN = re.compile(
    r"\..*|@(eaDir|tmp|Recycle|Recently-Snapshot)|#(recycle|snapshot)|\$RECYCLE\.BIN|__MACOSX"
    r"|__pycache__|lost\+found|System Volume Information",
    re.IGNORECASE | re.DOTALL,
)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is hidden, or one that a system keeps for itself."""
    return _HIDDEN.fullmatch(name) is not None


def unread_extension(name: str) -> str:
    """Return the extension of an image that is not read, in lower case; empty if it is none."""
    extension = os.path.splitext(name)[1].lower()
    return extension if _UNREAD.fullmatch(extension) and not is_hidden(name) else ""


def is_image_name(name: str) -> bool:
    """Whether a file name is that of an image: not hidden, with one of :data:`EXTENSIONS`."""
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def check_inside(name: str, where: str) -> None:
    """Check that a name in an archive or index is a path below its folder, on any system."""
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if not path.parts or path.anchor or ".." in path.parts or "\0" in name:
            raise DataError(
                f"{where} holds the name {name!r}, which leads out of it; valid: relative names "
                "without '..'"
            )


class ImageSource(Protocol):
    """Encoded images, numbered in the same way on every rank and in every run.

    The order of training is independent of the source (:mod:`~largebatch.pipeline.order`), so
    every source supports random access.
    """

    kind: str  #: Name of the source in recipes and checkpoints.
    classes: tuple[str, ...]  #: Class names, by class number.
    labels: NDArray[np.int64]  #: Class numbers, shape ``[len(source)]``.

    @property
    def fingerprint(self) -> str:
        """Hash of names and labels in order, independent of where the images are stored."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return the path of an image for messages; in shards, the shard's path and its name."""

    def read(self, indices: NDArray[np.int64]) -> list[Encoded | DataError]:
        """Read images; return for each its bytes, or an error that names it by :meth:`name`.

        Called from several threads at once, none of which runs the training loop.

        Args:
            indices: Indices of the images in any order, possibly repeated, int64, shape ``[n]``.

        Raises:
            DataError: Reading failed for a reason that does not concern single images.
        """
