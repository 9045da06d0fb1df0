"""Which image comes when, and with which random numbers: functions of (seed, epoch) alone.

Training reads one endless stream of images: all of them in the order of epoch 0, then of epoch 1,
and so on. Global batch k is the k-th run of ``batch_size`` images of the stream, whatever the
number of ranks; where the batch does not divide the images, a batch goes on into the next epoch,
so none is dropped or seen twice in an epoch. The random numbers of an image (its crop and flip)
belong to its place in the stream. So nothing about the order must be saved to resume it, and any
number of ranks sees the same images with the same crops.

Raw bits of NumPy's Philox generator are used, since those stay the same across versions of NumPy
and platforms (NEP 19); its distributions may change.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

#: Random numbers for each image.
UNIFORMS = 24

_SHUFFLE, _AUGMENT = 0, 1
_PHILOX_WORDS = 4  # 64-bit words made at each count of the generator


def epoch_order(images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A random permutation of ``range(images)``, shape ``[images]``."""
    return np.argsort(_philox(seed, epoch, _SHUFFLE).random_raw(images), kind="stable")


def uniforms(seed: int, epoch: int, first: int, count: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) for places ``first`` to ``first + count`` of an epoch.

    Shape ``[count, UNIFORMS]``. A place has the same numbers in whatever piece it is asked for.
    """
    bits = _philox(seed, epoch, _AUGMENT)
    bits.advance(first * UNIFORMS // _PHILOX_WORDS)
    words = np.asarray(bits.random_raw(count * UNIFORMS), dtype=np.uint64)
    bits53 = (words >> np.uint64(11)).reshape(count, UNIFORMS)
    return np.asarray(bits53 * 2.0**-53, dtype=np.float64)


def _philox(seed: int, epoch: int, purpose: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed, 2 * epoch + purpose], dtype=np.uint64))


class Stream:
    """The endless order of training.

    Args:
        images: how many there are, at least 1.
        seed: >= 0.
    """

    def __init__(self, images: int, seed: int) -> None:
        self._images = images
        self._seed = seed
        self._orders: dict[int, NDArray[np.int64]] = {}

    def take(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Images ``start`` to ``start + count`` of the stream.

        Returns:
            Their indices, shape ``[count]``, and random numbers, ``[count, UNIFORMS]``.
        """
        indices, numbers = [], []
        for epoch, first, length in self._pieces(start, count):
            indices.append(self._order(epoch)[first : first + length])
            numbers.append(uniforms(self._seed, epoch, first, length))
        return np.concatenate(indices), np.concatenate(numbers)

    def _pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        while count > 0:
            epoch, first = divmod(start, self._images)
            length = min(count, self._images - first)
            yield epoch, first, length
            start, count = start + length, count - length

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            # Blocks never reach back past the last epoch that was asked for.
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = epoch_order(self._images, self._seed, epoch)
        return self._orders[epoch]


def evaluation_share(images: int, rank: int, world_size: int) -> range:
    """The images that ``rank`` evaluates: together, every image exactly once."""
    return range(rank * images // world_size, (rank + 1) * images // world_size)
