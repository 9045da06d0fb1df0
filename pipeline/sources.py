"""Where images come from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import DataError

#: Names of images end in one of these (in either case).
EXTENSIONS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")


class ImageFolder:
    """Images in the ImageNet folder layout: ``root/split/class/image``.

    Classes are numbered in the order of their names, images sorted by class and name, so every
    rank and every run numbers them alike.

    Args:
        root: the folder of the data set.
        split: ``"train"`` or ``"val"``.
        classes: their names, to number them as another split does; by default the folders here.

    Raises:
        DataError: a folder is missing or cannot be read, a class folder is empty, or a class is
            unknown.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "train",
        classes: tuple[str, ...] | None = None,
    ) -> None:
        self.folder = Path(root) / split
        if not os.path.isdir(self.folder):
            raise DataError(
                f"no data folder {self.folder}: it must hold one folder of images per class, "
                f"{self.folder}/<class>/<image>.jpeg"
            )
        found = tuple(_names(self.folder, lambda entry: entry.is_dir()))
        if not found:
            raise DataError(f"{self.folder} has no class folders: {self.folder}/<class>/<image>")
        self.classes = found if classes is None else classes
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise DataError(
                f"{self.folder / unknown[0]} is no class of the training images "
                f"({len(self.classes)} classes, {self.classes[0]} to {self.classes[-1]})"
            )
        numbers = {name: number for number, name in enumerate(self.classes)}
        names: list[str] = []
        labels: list[int] = []
        for name in found:
            folder = self.folder / name
            images = _names(folder, lambda entry: _is_image(entry.name))
            if not images:
                raise DataError(
                    f"class folder {folder} has no images ({', '.join(EXTENSIONS)}): "
                    "add some or remove the folder"
                )
            names += [f"{name}/{image}" for image in images]
            labels += [numbers[name]] * len(images)
        self._names = names
        self.labels: NDArray[np.int64] = np.array(labels, dtype=np.int64)
        self._sizes = np.zeros((len(names), 2), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._names)

    def path(self, index: int) -> str:
        """The path of an image."""
        return str(self.folder / self._names[index])

    def sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Width and height in pixels, shape ``[len(indices), 2]``; headers are read once.

        EXIF orientation is not applied, as torchvision does not.

        Raises:
            DataError: a file is not an image that can be read.
        """
        for index in indices[self._sizes[indices, 0] == 0]:
            self._sizes[index] = _image_size(self.path(index))
        return self._sizes[indices]

    def check(self, indices: NDArray[np.int64]) -> None:
        """Decode images one by one.

        Raises:
            DataError: names the first file that cannot be decoded.
        """
        from PIL import Image

        for index in indices:
            try:
                with Image.open(self.path(index)) as image:
                    image.convert("RGB")
            except (OSError, SyntaxError) as error:
                raise DataError(f"{self.path(index)} cannot be decoded: {error}") from error

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the names and labels in order; it does not depend on where the folder is."""
        content = "\n".join([*self.classes, "", *self._names])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class Synthetic:
    """Random images with random labels, already on the device: training without input.

    Args:
        images: how many there are taken to be, at least 1.
        classes: how many classes.
    """

    def __init__(self, images: int, classes: int) -> None:
        self._images = images
        self.classes = tuple(f"{i:0{len(str(classes - 1))}d}" for i in range(classes))

    def __len__(self) -> int:
        return self._images

    @property
    def fingerprint(self) -> str:
        """Its numbers of images and classes."""
        return f"synthetic-{self._images}-{len(self.classes)}"


Source = ImageFolder | Synthetic


def _names(folder: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """The names of what is wanted in a folder, in order."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if wanted(entry))
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def _image_size(path: str) -> tuple[int, int]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.size
    except (OSError, SyntaxError) as error:
        raise DataError(f"{path} is not an image that can be read: {error}") from error
