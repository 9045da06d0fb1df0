"""Random batches instead of decoded images, for training without input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .batch import Batch, DecodedBatch, MemoryLayout

_BATCHES = 4


@dataclass(eq=False)
class SyntheticBackend:
    """Repeats a few random batches: they cost no time, and the loss can still fall."""

    classes: int
    layout: MemoryLayout
    seed: int
    size: int | None  # images in a full batch of evaluation; None in training, where all are full
    device: torch.device
    _pool: dict[tuple[int, int, int], Batch] = field(default_factory=dict)

    version: ClassVar[str] = "1"

    def __call__(self, pieces: Iterable[tuple[int, int, int]]) -> Iterator[DecodedBatch]:
        """Yield a batch for each piece, given as position among all images, length, image size."""
        for start, count, image_size in pieces:
            size = self.size or count
            images, labels = self._batch(start // size % _BATCHES, size, image_size)
            yield DecodedBatch(Batch(images[:count], labels[:count]), None)

    def _batch(self, place: int, size: int, image_size: int) -> Batch:
        key = place, size, image_size
        if key not in self._pool:
            generator = torch.Generator().manual_seed((_BATCHES * self.seed + place) % 2**63)
            labels = torch.randint(self.classes, (size,), generator=generator)
            images = torch.randn((size, 3, image_size, image_size), generator=generator)
            images = images.to(self.layout.dtype, memory_format=self.layout.memory_format)
            self._pool[key] = Batch(images.to(self.device), labels.to(self.device))
        return self._pool[key]
