"""What every source of images gives: a numbered list of encoded images with labels."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError

#: An encoded image as it lies in its file, shape ``[bytes]``.
Encoded = NDArray[np.uint8]


class ImageSource(Protocol):
    """Encoded images, in an order that is the same on every rank and in every run.

    Which image comes when is not the source's affair (:mod:`~largebatch.pipeline.order`), so every
    source can be read at any place.

    Attributes:
        kind: what it is called in recipes and checkpoints.
        classes: names of the classes, by number.
        labels: class numbers, int64, shape ``[len(source)]``.
        fingerprint: a hash of names and labels in order, whatever the place they lie in.
    """

    kind: str
    classes: tuple[str, ...]
    labels: NDArray[np.int64]

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Where an image lies, for messages: a path, or a shard's with the image's name."""
        ...

    def read(self, indices: NDArray[np.int64]) -> list[Encoded | DataError]:
        """The bytes of images, or what went wrong with each that cannot be read.

        Called from several threads at once, none of which is the training loop's.

        Args:
            indices: shape ``[n]``, in any order, with repeats.

        Returns:
            ``n`` of either; an error names the image by :meth:`name`.

        Raises:
            DataError: reading failed in a way that is not about single images.
        """
        ...
