"""A subset of a source's images, and the split of training images for tuning."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..order import epoch_order
from .base import Encoded, ImageSource

_SEED = 2**63  # outside the seeds of training, so the split is independent of any order of training


class Subset(ImageSource):
    """A subset of the images of a source, with indices of its own.

    Args:
        source: The source of the images.
        indices: Indices of the images in ``source``, a sequence or an array, shape ``[n]``.
    """

    def __init__(self, source: ImageSource, indices: Sequence[int] | NDArray[np.int64]) -> None:
        self._source, self._indices = source, np.asarray(indices, np.int64)
        self.kind, self.classes = source.kind, source.classes
        self.labels: NDArray[np.int64] = source.labels[self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def fingerprint(self) -> str:
        numbers = self._indices.astype("<i8").tobytes()
        return hashlib.sha256(self._source.fingerprint.encode() + numbers).hexdigest()

    def name(self, index: int) -> str:
        return self._source.name(int(self._indices[index]))

    def read(self, indices: NDArray[np.int64]) -> list[Encoded | DataError]:
        return self._source.read(self._indices[indices])


def hold_out(source: ImageSource, count: int) -> tuple[Subset, Subset]:
    """Split the images at random into those to train on and ``count`` others.

    The split depends on the number of images and on ``count`` alone.

    Raises:
        DataError: One of the two parts would be empty.
    """
    images = len(source)
    if not 0 < count < images:
        raise DataError(f"cannot hold out {count} of {images} images; valid: 1 to {images - 1}")
    order = epoch_order(images, _SEED, 0)
    return Subset(source, np.sort(order[count:])), Subset(source, np.sort(order[:count]))
