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
from .base import EXTENSIONS, Encoded, is_image_name
from .shards.index import INDEX_FILE, Index


class ImageFolder:
    """Images in the ImageNet folder layout: ``root/split/class/image``.

    Classes are numbered in the order of their names, and images are sorted by class and name, so
    that every rank and every run numbers them in the same way.

    Args:
        root: Folder of the data set.
        split: ``"train"`` or ``"val"``.
        classes: Class names by number, to number them as another split does; by default the sorted
            names of the class folders.

    Raises:
        DataError: A folder is missing or cannot be read, a class folder is empty, or a class is
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
                f"no data folder {self.folder}; valid: one folder of images per class, "
                f"{self.folder}/<class>/<image>.jpeg"
            )
        found = tuple(_names(self.folder, lambda entry: entry.is_dir()))
        if not found:
            _refuse_shards(self.folder)
            raise DataError(
                f"{self.folder} has no class folders; valid: {self.folder}/<class>/<image>"
            )
        self.classes = found if classes is None else classes
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise DataError(
                f"{self.folder / unknown[0]} is not a class of the training images "
                f"({len(self.classes)} classes, {self.classes[0]} to {self.classes[-1]})"
            )
        numbers = {name: number for number, name in enumerate(self.classes)}
        names: list[str] = []
        labels: list[int] = []
        for name in found:
            folder = self.folder / name
            images = _names(folder, lambda entry: is_image_name(entry.name))
            if not images:
                raise DataError(
                    f"class folder {folder} has no images ({', '.join(EXTENSIONS)}): "
                    "add images or remove the folder"
                )
            names += [f"{name}/{image}" for image in images]
            labels += [numbers[name]] * len(images)
        self._names = names
        self._prefix = f"{self.folder}/"
        self.labels: NDArray[np.int64] = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return f"{self._prefix}{self._names[index]}"

    def read(self, indices: NDArray[np.int64]) -> list[Encoded | DataError]:
        """Read images; for each its bytes, or why it cannot be read."""
        return [self._read(self.name(index)) for index in indices]

    def _read(self, path: str) -> Encoded | DataError:
        try:
            # System calls: opening a Python file object takes several times as long.
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
        """Hash of names and labels in order; it does not depend on where the folder is."""
        content = "\n".join([*self.classes, "", *self._names])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def _refuse_shards(folder: Path) -> None:
    index = folder / INDEX_FILE
    if index.is_file():
        format = Index.load(index.read_bytes(), str(index)).format
        raise DataError(f"{folder} holds shards, not class folders; valid: data.source={format}")


def _names(folder: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Return the sorted names of the entries of a folder that are wanted."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if wanted(entry))
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
