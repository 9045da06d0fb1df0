"""Random batches instead of decoded images, for training without input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from .batch import Batch, DecodedBatch, MemoryLayout

_BATCHES = 4


class SyntheticBackend:
    """Repeats a few random batches: they cost no time, and the loss can still fall.

    ``size`` is the number of images in a full batch of evaluation; None in training, where all are.
    """

    def __init__(
        self,
        classes: int,
        layout: MemoryLayout,
        *,
        seed: int,
        size: int | None,
        device: torch.device,
    ) -> None:
        self._classes = classes
        self._layout = layout
        self._seed = seed
        self._size = size
        self._device = device
        self._pool: dict[tuple[int, int, int], Batch] = {}

    version = "1"

    def __call__(self, pieces: Iterable[tuple[int, int, int]]) -> Iterator[DecodedBatch]:
        """Yield a batch for each piece, given as position among all images, length, image size."""
        for start, count, image_size in pieces:
            size = self._size or count
            images, labels = self._batch(start // size % _BATCHES, size, image_size)
            yield DecodedBatch(Batch(images[:count], labels[:count]), None)

    def _batch(self, place: int, size: int, image_size: int) -> Batch:
        key = place, size, image_size
        if key not in self._pool:
            generator = torch.Generator().manual_seed((_BATCHES * self._seed + place) % 2**63)
            labels = torch.randint(self._classes, (size,), generator=generator)
            images = torch.randn((size, 3, image_size, image_size), generator=generator)
            images = images.to(self._layout.dtype, memory_format=self._layout.memory_format)
            self._pool[key] = Batch(images.to(self._device), labels.to(self._device))
        return self._pool[key]
