"""The order of images and their random numbers, as functions of (seed, epoch) alone.

Training reads one endless stream of images: all of them in the order of epoch 0, then all of them
in the order of epoch 1, and so on. Global batch k is the k-th run of ``batch_size`` images of the
stream, for any number of ranks. If the batch size does not divide the number of images, a batch
continues into the next epoch, so that no image is dropped or seen twice in an epoch. The random
numbers of an image (for its crop and flip) belong to its position in the stream; one that is to
alternate from epoch to epoch belongs to the image. Resuming therefore needs no saved order, and any
number of ranks sees the same images with the same crops.

With repeated augmentation (Hoffer et al. 2020, arXiv:1901.09335; Berman et al. 2019,
arXiv:1902.05509) positions k j to k j + k - 1 of the stream show the same image, with random
numbers of their own: position p of an epoch shows image p // k of the epoch's order, but where the
epoch before it ends within such a run. A micro-batch of a multiple of k images so holds whole runs,
in every epoch. As in the samplers of DeiT, torchvision and timm, an epoch keeps its length, and so
shows the first 1 / k of its order: other images in each epoch. There, the copies of an image go to
different ranks; here they follow each other, so that they share a micro-batch.

The raw bits of NumPy's Philox generator are used because they stay the same across platforms and
versions of NumPy (NEP 19), while its distributions may change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

#: Number of random numbers per image, for its crop and flip.
UNIFORMS = 24
#: Number of those after them, for :mod:`.decode.policy` and :mod:`.decode.erasing`.
FURTHER = 48

# What random numbers are for. The last one's keys are apart from those of all epochs.
_SHUFFLE, _AUGMENT, _FURTHER = 0, 1, 2**63
_OF_IMAGES = 2**63  # outside the seeds of training
_PHILOX_WORDS = 4  # 64-bit words per step of the generator's counter


def epoch_order(images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the random permutation of ``range(images)`` for an epoch, int64, ``[images]``."""
    return np.argsort(_philox(seed, epoch, _SHUFFLE).random_raw(images), kind="stable")


def uniforms(
    seed: int, epoch: int, first: int, count: int, *, further: bool = False
) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1) for positions ``first`` to ``first + count`` of an epoch.

    Shape ``[count, UNIFORMS]``, or ``[count, FURTHER]`` with ``further``, FP64. The numbers of a
    position do not depend on the slice in which they are requested.
    """
    columns, purpose = (FURTHER, _FURTHER) if further else (UNIFORMS, _AUGMENT)
    bits = _philox(seed, epoch, purpose)
    bits.advance(first * columns // _PHILOX_WORDS)
    return _fractions(bits, count * columns).reshape(count, columns)


def _fractions(bits: np.random.Philox, count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1), each from the upper 53 of 64 random bits."""
    words = np.asarray(bits.random_raw(count), dtype=np.uint64)
    return np.asarray((words >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def _philox(seed: int, epoch: int, purpose: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed, 2 * epoch + purpose], dtype=np.uint64))


@dataclass(eq=False)
class Stream:
    """The endless stream of training images."""

    images: int  #: Number of images in the data set, at least 1.
    seed: int  #: Seed of the order and of the random numbers, >= 0 and below 2^63.
    #: Column of the random numbers that alternates: an image has one number of its own there in
    #: even epochs, and the same plus one half, modulo 1, in odd ones.
    alternating: int | None = None
    further: bool = False  #: Whether :meth:`take` also returns the numbers after the first ones.
    repeats: int = 1  #: Number of positions that show the same image, from a multiple of it on.
    _orders: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def take(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the images at positions from ``start`` on, and their random numbers, FP64."""
        indices, numbers = self._shown(np.arange(start, start + count)), []
        shown = indices
        while count > 0:
            epoch, first = divmod(start, self.images)
            length = min(count, self.images - first)
            start, count = start + length, count - length
            at, shown = np.split(shown, [length])
            drawn = uniforms(self.seed, epoch, first, length)
            if self.alternating is not None:
                drawn[:, self.alternating] = (self._of_images[at] + epoch % 2 / 2) % 1
            if self.further:
                after = uniforms(self.seed, epoch, first, length, further=True)
                drawn = np.concatenate([drawn, after], axis=1)
            numbers.append(drawn)
        return indices, np.concatenate(numbers)

    def _shown(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The images at ascending positions of the stream."""
        first_shown = positions - positions % self.repeats
        epochs, places = np.divmod(first_shown, self.images)
        parts = [
            self._order(epoch)[places[epochs == epoch] // self.repeats]
            for epoch in np.unique(epochs).tolist()
        ]
        return np.concatenate(parts)

    @cached_property
    def _of_images(self) -> NDArray[np.float64]:
        return _fractions(_philox(self.seed + _OF_IMAGES, 0, _AUGMENT), self.images)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            # Requests never reach back further than the epoch before this one.
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = epoch_order(self.images, self.seed, epoch)
        return self._orders[epoch]


def evaluation_share(images: int, rank: int, world_size: int) -> range:
    """Return the images that ``rank`` evaluates; the shares of all ranks cover each image once."""
    return range(rank * images // world_size, (rank + 1) * images // world_size)
