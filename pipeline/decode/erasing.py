"""Random erasing (Zhong et al. 2017, arXiv:1708.04896) of normalised images, following timm.

A rectangle of 2 % to a third of the area, with an aspect ratio log-uniform from 0.3 to 1 / 0.3,
becomes zero, the mean colour. Rectangles are functions of the random numbers of an image, and equal
for every backend. Images are erased where they are, a slice each, without waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from ..order import FURTHER, UNIFORMS
from .batch import DecodedBatch
from .policy import NUMBERS

_AREA, _MIN_ASPECT = (0.02, 1 / 3), 0.3
_TRIES = 10
_WHETHER, _X, _Y, _SIZES = 0, 1, 2, 4  # 3 was that of noise
assert NUMBERS + _SIZES + 2 * _TRIES <= FURTHER


def rectangles(
    numbers: NDArray[np.float64], probability: float, image_size: int
) -> NDArray[np.int64]:
    """Return left, top, width and height of the part of each image that is erased, ``[n, 4]``.

    The first of ten tries that is smaller than the image is placed uniformly. Width and height are
    0 where none is, and for images that are left whole.
    """
    areas, aspects = np.split(numbers[:, _SIZES : _SIZES + 2 * _TRIES], 2, axis=1)
    area = (_AREA[0] + (_AREA[1] - _AREA[0]) * areas) * image_size**2
    aspect = np.exp((1 - 2 * aspects) * math.log(_MIN_ASPECT))
    tried = np.rint(np.sqrt(np.stack([area / aspect, area * aspect], axis=-1))).astype(np.int64)
    fits = np.all(tried < image_size, axis=-1)
    sides = tried[np.arange(len(numbers)), fits.argmax(axis=1)]
    erased = (numbers[:, _WHETHER] < probability) & fits.any(axis=1)
    corner = np.floor(numbers[:, [_X, _Y]] * (image_size - sides + 1)).astype(np.int64)
    return np.where(erased[:, None], np.concatenate([corner, sides], axis=1), 0)


def erase(batches: Iterable[DecodedBatch], probability: float) -> Iterator[DecodedBatch]:
    """Erase parts of the images of batches of training, where they are."""
    for decoded in batches:
        images, request = decoded.batch.images, decoded.request
        assert request is not None
        assert request.uniforms is not None
        numbers = request.uniforms[:, UNIFORMS + NUMBERS :]
        found = rectangles(numbers, probability, request.image_size)
        for i in np.flatnonzero(found[:, 2]).tolist():
            left, top, width, height = found[i].tolist()
            images[i, :, top : top + height, left : left + width].zero_()
        yield decoded
