"""Images in the ImageNet folder layout."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .base import Encoded
from .shards.index import INDEX, Index

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

    kind = "folder"

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
            _refuse_shards(self.folder)
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
        self._prefix = f"{self.folder}/"
        self.labels: NDArray[np.int64] = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        """The path of an image."""
        return f"{self._prefix}{self._names[index]}"

    def read(self, indices: NDArray[np.int64]) -> list[Encoded | DataError]:
        """The bytes of images, or why one of them cannot be read; shape ``[len(indices)]``."""
        return [self._read(self.name(index)) for index in indices]

    def _read(self, path: str) -> Encoded | DataError:
        try:
            # Plain calls: opening a Python file takes several times as long.
            file = os.open(path, os.O_RDONLY)
            try:
                size = os.fstat(file).st_size
                content = np.empty(size, dtype=np.uint8)
                done = 0
                while done < size and (count := os.readv(file, [content.data[done:]])):
                    done += count
            finally:
                os.close(file)
        except OSError as error:
            return DataError(f"{path} cannot be read: {error.strerror}")
        return content[:done]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the names and labels in order; it does not depend on where the folder is."""
        content = "\n".join([*self.classes, "", *self._names])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def _refuse_shards(folder: Path) -> None:
    index = folder / INDEX
    if index.is_file():
        format = Index.load(index.read_bytes(), str(index)).format
        raise DataError(f"{folder} holds shards, no class folders: data.source={format} reads them")


def _names(folder: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """The names of what is wanted in a folder, in order."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if wanted(entry))
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")
