"""CIFAR-10 images on the GPU: read once, then cropped and mirrored there.

No loader limits a run then, and small batches cost as much as the host needs to launch kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.place import Place, need
from benchmarks.gpu.report import Skipped
from largebatch.pipeline import ImageFolder

_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
#: Height and width of an image, and of its reflection on each side, in pixels.
SIZE, SHIFT = 32, 2

#: Images of mean 0 and deviation 1 with their reflection around them, FP32, shape
#: ``[n, 3, 36, 36]``, and labels, int64, shape ``[n]``.
Split = tuple[Tensor, Tensor]


def read(place: Place) -> tuple[Split, Split]:
    """Read the images to train on and to test on, to the device; random ones in a dry run."""
    if place.dry:
        pixels = torch.randint(256, (96, SIZE, SIZE, 3), dtype=torch.uint8)
        images, labels = prepared(pixels), torch.arange(96) % 10
        return (images[:64], labels[:64]), (images[64:], labels[64:])
    if place.cifar10 is None:
        raise Skipped("needs data: --cifar10 FOLDER")
    need("PIL")
    train, test = (_split(place.cifar10, name, place.device) for name in ("train", "val"))
    return train, test


def _split(folder: Path, name: str, device: torch.device) -> Split:
    from PIL import Image

    source = ImageFolder(folder, name)
    paths = [source.folder / source.name(index) for index in range(len(source))]
    with ThreadPoolExecutor() as threads:  # decoding lets other threads run
        read = threads.map(lambda path: np.asarray(Image.open(path).convert("RGB")), paths)
        pixels = torch.from_numpy(np.stack([*read]))
    labels = torch.tensor([source.classes.index(path.parent.name) for path in paths])
    return prepared(pixels.to(device)), labels.to(device)


def prepared(pixels: Tensor) -> Tensor:
    """Return images as in :data:`Split` of pixels, uint8, shape ``[n, 32, 32, 3]``."""
    mean, std = (torch.tensor(values, device=pixels.device) for values in (_MEAN, _STD))
    images = ((pixels.float() / 255 - mean) / std).permute(0, 3, 1, 2)
    return F.pad(images, (SHIFT,) * 4, mode="reflect")


def cropped(images: Tensor, down: int = SHIFT, right: int = SHIFT) -> Tensor:
    """Return the same crop of each image, channels_last; by default the image itself."""
    crop = images[:, :, down : down + SIZE, right : right + SIZE]
    return crop.contiguous(memory_format=torch.channels_last)


def batches(images: Tensor, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end, of images that are each cropped at a place of its own.

    Every image comes once in an epoch. Half of the images, drawn once, are mirrored in even epochs
    and the others in odd ones.
    """
    device, count = images.device, len(images)
    generator = torch.Generator(device).manual_seed(seed)
    first = torch.rand(count, generator=generator, device=device) < 0.5
    indices = torch.empty(0, dtype=torch.int64, device=device)
    mirrored, epoch = torch.empty(0, dtype=torch.bool, device=device), 0
    across = torch.arange(SIZE, device=device)
    while True:
        while len(indices) < batch:
            more = torch.randperm(count, generator=generator, device=device)
            indices = torch.cat([indices, more])
            mirrored, epoch = torch.cat([mirrored, first[more] ^ bool(epoch % 2)]), epoch + 1
        down, right = torch.randint(
            2 * SHIFT + 1, (2, batch, 1), generator=generator, device=device
        )
        columns = right + torch.where(mirrored[:batch, None], SIZE - 1 - across, across)
        rows, chosen = down + across, indices[:batch]
        # Indices on both sides of a slice move its dimension to the end: channels_last.
        found = images[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        yield found.permute(0, 3, 1, 2), chosen
        indices, mirrored = indices[batch:], mirrored[batch:]
