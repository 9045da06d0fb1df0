"""Random batches in place of images: training without input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from .batch import Batch, Form, Made

_BATCHES = 4


class SyntheticBackend:
    """Gives a few random batches over and over: no work, and the loss can still fall.

    Args:
        classes: how many classes.
        form: how images lie in memory.
        seed: of their values.
        size: images of a whole batch in evaluation; None in training, where all are whole.
        device: where batches are wanted.
    """

    def __init__(
        self, classes: int, form: Form, *, seed: int, size: int | None, device: torch.device
    ) -> None:
        self._classes = classes
        self._form = form
        self._seed = seed
        self._size = size
        self._device = device
        self._pool: dict[tuple[int, int, int], Batch] = {}

    version = "1"

    def __call__(self, pieces: Iterable[tuple[int, int, int]]) -> Iterator[Made]:
        """Yield a batch for each piece: its place among all images, length and image size."""
        for start, count, image_size in pieces:
            size = self._size or count
            images, labels = self._batch(start // size % _BATCHES, size, image_size)
            yield Made(Batch(images[:count], labels[:count]), None)

    def _batch(self, place: int, size: int, image_size: int) -> Batch:
        key = place, size, image_size
        if key not in self._pool:
            generator = torch.Generator().manual_seed((_BATCHES * self._seed + place) % 2**63)
            labels = torch.randint(self._classes, (size,), generator=generator)
            images = torch.randn((size, 3, image_size, image_size), generator=generator)
            images = images.to(self._form.dtype, memory_format=self._form.memory_format)
            self._pool[key] = Batch(images.to(self._device), labels.to(self._device))
        return self._pool[key]
