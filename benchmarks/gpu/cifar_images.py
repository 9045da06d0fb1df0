"""CIFAR-10 images on the GPU: read once as uint8, then cropped and mirrored there.

No loader limits a run then, and small batches cost as much as the host needs to launch kernels.
"""

from __future__ import annotations

import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.place import Place, need
from benchmarks.gpu.report import Skipped

_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

#: Images, uint8, shape ``[n, 3, 32, 32]``, and labels, int64, shape ``[n]``.
Split = tuple[Tensor, Tensor]


def read(place: Place) -> tuple[Split, Split]:
    """Read the images to train on and to test on, to the device.

    Raises:
        Skipped: they are not there.
    """
    if place.dry:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(256, (96, 3, 32, 32), generator=generator, dtype=torch.uint8)
        labels = torch.arange(96) % 10
        return (pixels[:64], labels[:64]), (pixels[64:], labels[64:])
    if place.cifar10 is None:
        raise Skipped("needs data: --cifar10 PATH")
    need("PIL")
    files = _files_of_folder if place.cifar10.is_dir() else _files_of_archive
    train, test = _decoded(files(place.cifar10))
    device = place.device
    return (train[0].to(device), train[1].to(device)), (test[0].to(device), test[1].to(device))


def _files_of_folder(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _files_of_archive(archive: Path) -> dict[str, bytes]:
    files = {}
    with tarfile.open(archive) as opened:
        for member in opened:
            found = opened.extractfile(member) if member.isfile() else None
            if found is not None:
                files[member.name] = found.read()
    return files


def _decoded(files: dict[str, bytes]) -> tuple[Split, Split]:
    """Decode images named ``train/<class>/...``, and ``test/`` or ``val/``, in order of name."""
    names: dict[str, list[str]] = {"train": [], "test": []}
    for name in sorted(files):
        parts = Path(name).parts[-3:]
        if len(parts) == 3 and parts[0] in ("train", "test", "val"):
            names["train" if parts[0] == "train" else "test"].append(name)
    classes = sorted({Path(name).parts[-2] for name in names["train"]})
    if not classes or not names["test"]:
        raise Skipped("the data have no images in train/<class>/, and test/ or val/")

    def split(of: list[str]) -> Split:
        with ThreadPoolExecutor() as threads:  # decoding lets other threads run
            pixels = np.stack([*threads.map(_pixels, (files[name] for name in of))])
        labels = [classes.index(Path(name).parts[-2]) for name in of]
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)

    return split(names["train"]), split(names["test"])


def _pixels(content: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def augmented(images: Tensor, mirrored: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Crop each image at a place of its own, and mirror some.

    Args:
        images: padded, shape ``[n, 3, h, h]``.
        mirrored: whether each image is mirrored, bool, ``[n]``.
        size: height and width of the crops.
        generator: source of random numbers, on the device of ``images``.
    """
    count, _, height, _ = images.shape
    device, most = images.device, height - size + 1
    across = torch.arange(size, device=device)
    columns = torch.where(mirrored[:, None], size - 1 - across, across)
    columns = columns + torch.randint(most, (count, 1), generator=generator, device=device)
    rows = across + torch.randint(most, (count, 1), generator=generator, device=device)
    index = torch.arange(count, device=device)[:, None, None]
    # Indices on both sides of a slice move its dimension to the end.
    return images[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@cache  # a copy to a GPU waits for it
def _mean_and_std(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (_MEAN, _STD))
    return mean, std


def normalised(images: Tensor) -> Tensor:
    """Return FP32 channels_last images of mean 0 and deviation 1."""
    mean, std = _mean_and_std(images.device)
    scaled = (images.float() / 255 - mean) / std
    return scaled.contiguous(memory_format=torch.channels_last)


def padded(images: Tensor, pixels: int) -> Tensor:
    """Return images with their reflection around them, uint8."""
    return F.pad(images.float(), (pixels,) * 4, mode="reflect").to(torch.uint8)


class Order:
    """The order of training: every image once in an epoch, mirrored in every other one.

    Half of the images, drawn once, are mirrored in even epochs and the others in odd ones.

    Args:
        count: number of images.
        seed: seed of the order and of the flips.
        device: where the indices are.
    """

    def __init__(self, count: int, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self._count, self._device, self._epoch = count, device, 0
        self._first = torch.rand(count, generator=self.generator, device=device) < 0.5
        self._indices = torch.empty(0, dtype=torch.int64, device=device)
        self._mirrored = torch.empty(0, dtype=torch.bool, device=device)

    def take(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return the next images' indices, int64, and whether each is mirrored, ``[batch]``."""
        while len(self._indices) < batch:
            more = torch.randperm(self._count, generator=self.generator, device=self._device)
            flips = self._first[more] ^ bool(self._epoch % 2)
            self._indices = torch.cat([self._indices, more])
            self._mirrored = torch.cat([self._mirrored, flips])
            self._epoch += 1
        indices, self._indices = self._indices[:batch], self._indices[batch:]
        mirrored, self._mirrored = self._mirrored[:batch], self._mirrored[batch:]
        return indices, mirrored
