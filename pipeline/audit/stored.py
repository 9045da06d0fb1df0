"""Splits of a data set on disk, with their faults.

A source (:mod:`~largebatch.pipeline.sources`) raises an error for the first fault. The classes here
accept everything and collect the faults, so that all of them can be reported at once.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..sources import INDEX_FILE, Index, is_image_name
from ..sources.shards.recordio import image_of_parts
from ..sources.shards.stale import stale_shards
from ..sources.storage.local import LocalStorage, read_range

_READ_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class ImageLocation:
    """The location of an encoded image: a file, or a byte range of a file.

    Attributes:
        path: Path of the file.
        offset: Offset of the byte range; None for the whole file.
        length: Length of the byte range.
        parts: Whether the byte range is an MXNet record in several parts.
    """

    path: str
    offset: int | None = None
    length: int = 0
    parts: bool = False

    def read(self) -> bytes:
        """Read the encoded image.

        Raises:
            ValueError: The image cannot be read; the message says why.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                if self.offset is None:
                    return file.read()
                content = read_range(file.fileno(), self.offset, self.length, Path(self.path))
        except IsADirectoryError:
            raise ValueError("it is a folder") from None
        except OSError as error:
            raise ValueError(f"it cannot be read: {error.strerror}") from error
        except DataError as error:
            raise ValueError(str(error)) from error
        return image_of_parts(content) if self.parts else content


class StoredSplit(ABC):
    """A split of a data set on disk.

    Attributes:
        split: Name of the split.
        format: ``folder``, or the format of its shards.
        classes: Class names, by class number.
        labels: Class numbers, int64, shape ``[images]``.
        shards: Numbers of the shards that exist.
        total_bytes: Total size of the images in bytes; None if unknown without reading them.
        numbers: Numbers of the images whose file or shard exists, int64.
        problems: Pairs of a name and its fault.
        others: Files that are not images.
    """

    split: str
    format: str
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    shards: Sequence[int]
    total_bytes: int | None
    numbers: NDArray[np.int64]
    problems: list[tuple[str, str]]
    others: list[str]

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def file(self, number: int) -> str:
        """Return the file name of an image, or its name in the index."""

    @abstractmethod
    def name(self, number: int) -> str:
        """Return the path of an image, for messages."""

    @abstractmethod
    def location(self, number: int) -> ImageLocation:
        """Return the location of the encoded image."""

    def check_shard(self, number: int) -> list[tuple[str, str]]:
        """Return the faults of a shard as a whole; folders have no shards."""
        return []

    def stale_shards(self) -> list[tuple[str, str]]:
        """Return the shards that hold other images than their index says."""
        return []


class StoredFolder(StoredSplit):
    """A split in class folders.

    Raises:
        DataError: The folder cannot be read.
    """

    format = "folder"
    shards = ()
    total_bytes = None

    def __init__(self, folder: Path, split: str) -> None:
        self.folder = folder
        self.split = split
        self.problems = []
        self.others = []
        self._names: list[str] = []
        classes: list[str] = []
        labels: list[int] = []
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"{folder} cannot be read: {error.strerror}") from error
        for entry in entries:
            if not entry.is_dir():
                self.others.append(entry.path)
                continue
            images = self._list(entry.path)
            if not images:
                self.problems.append((entry.path, "a class without images"))
            labels += [len(classes)] * len(images)
            classes.append(entry.name)
            self._names += [f"{entry.name}/{image}" for image in images]
        self.classes = tuple(classes)
        self.labels = np.array(labels, np.int64)
        self.numbers = np.arange(len(labels))

    def _list(self, folder: str) -> list[str]:
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            self.problems.append((folder, f"it cannot be read: {error.strerror}"))
            return []
        images = [name for name in names if is_image_name(name)]
        if len(images) < len(names):
            wanted = set(images)
            self.others += [f"{folder}/{name}" for name in names if name not in wanted]
        return images

    def file(self, number: int) -> str:
        """Return the name of the file."""
        return self._names[number]

    def name(self, number: int) -> str:
        """Return the path of the file."""
        return f"{self.folder}/{self._names[number]}"

    def location(self, number: int) -> ImageLocation:
        """Return the file as location."""
        return ImageLocation(self.name(number))


class StoredShards(StoredSplit):
    """A split in shards with an index.

    Raises:
        DataError: The index cannot be read or is not an index.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder = folder
        self.split = split
        self.problems = []
        where = folder / INDEX_FILE
        try:
            self._index = index = Index.load(where.read_bytes(), str(where))
            listed = {INDEX_FILE, *index.shards}
            idx = {f"{Path(name).stem}.idx" for name in index.shards}
            self.others = sorted(str(folder / n) for n in set(os.listdir(folder)) - listed - idx)
        except OSError as error:
            raise DataError(f"{where} cannot be read: {error.strerror}") from error
        self.format = index.format
        self.classes = index.classes
        self.labels = index.labels
        counts = Counter(index.shard.tolist())
        there = []
        for number in range(len(index.shards)):
            try:
                os.stat(self._path(number))
                there.append(number)
            except OSError as error:
                lost = f"{counts[number]:,} images lost"
                self.problems.append((self._path(number), f"{error.strerror}; {lost}"))
        self.shards = there
        self.numbers = np.flatnonzero(np.isin(index.shard, there))
        self.total_bytes = int(index.length[self.numbers].sum())

    def _path(self, shard: int) -> str:
        return f"{self.folder}/{self._index.shards[shard]}"

    def file(self, number: int) -> str:
        """Return the name in the index."""
        return self._index.names[number]

    def name(self, number: int) -> str:
        """Return the path of the shard, a colon, and the name in the index."""
        return f"{self._path(int(self._index.shard[number]))}:{self._index.names[number]}"

    def location(self, number: int) -> ImageLocation:
        """Return the byte range from the index."""
        index = self._index
        return ImageLocation(
            self._path(int(index.shard[number])),
            int(index.offset[number]),
            int(index.length[number]),
            bool(index.split[number]),
        )

    def check_shard(self, number: int) -> list[tuple[str, str]]:
        """Compare the size and the checksum of a shard with the index."""
        path, wanted = self._path(number), int(self._index.shard_bytes[number])
        digest = hashlib.sha256()
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != wanted:
                    return [(path, f"it has {size:,} bytes, not {wanted:,} as in its index")]
                if not (sha256 := self._index.shard_sha256[number]):
                    return []
                while piece := file.read(_READ_BYTES):
                    digest.update(piece)
        except OSError as error:
            return [(path, f"it cannot be read: {error.strerror}")]
        if digest.hexdigest() != sha256:
            return [(path, "its SHA-256 checksum is not the one in its index")]
        return []

    def stale_shards(self) -> list[tuple[str, str]]:
        """Compare the places, names and labels of all images with the index."""
        index, storage = self._index, LocalStorage(self.folder)
        sizes = zip(storage.sizes(index.shards), index.shard_bytes.tolist(), strict=True)
        whole = [number for number, (found, wanted) in enumerate(sizes) if found == wanted]
        found = stale_shards(index, storage, whole, all_images=True)
        return [(storage.where(shard), what) for shard, what in found]


def stored_splits(path: Path) -> list[StoredSplit]:
    """Return the splits of the data set at ``path``, or ``path`` itself as the only split.

    Raises:
        DataError: There is no data set.
    """
    if not path.is_dir():
        raise DataError(f"no folder {path}; valid: a data set, or its folder train or val")
    names = [name for name in ("train", "val") if (path / name).is_dir()]
    found = [_stored(path / name, name) for name in names] or [_stored(path, path.name)]
    if not any(len(split) or split.problems for split in found):
        raise DataError(
            f"{path} holds no data set; valid: train/<class>/<image>.jpeg and "
            f"val/<class>/<image>.jpeg, or shards with their {INDEX_FILE} in train and val"
        )
    return found


def _stored(folder: Path, split: str) -> StoredSplit:
    if (folder / INDEX_FILE).exists():
        return StoredShards(folder, split)
    shards = [p for p in folder.iterdir() if p.suffix in (".tar", ".tfrecord", ".rec")]
    if shards:
        raise DataError(
            f"{folder} has shards, such as {shards[0].name}, but no {INDEX_FILE}: "
            f"write it with largebatch data index {folder}"
        )
    return StoredFolder(folder, split)
