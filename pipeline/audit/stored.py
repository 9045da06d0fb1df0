"""Splits of a data set as they lie on a disk, with whatever is wrong with them.

A source (:mod:`~largebatch.pipeline.sources`) refuses what cannot be trained on. These take
everything, and tell what is wrong, so that it can be told at once.
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
from ..sources import EXTENSIONS, INDEX, Index
from ..sources.shards.recordio import image_of_parts
from ..sources.storage.local import read_run

_READ_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Place:
    """Where an encoded image lies: in a file, or as a run of its bytes.

    Attributes:
        path: of the file.
        offset: of the run in bytes; None for the whole file.
        length: of the run in bytes.
        parts: whether the run is an MXNet record in several parts.
    """

    path: str
    offset: int | None = None
    length: int = 0
    parts: bool = False

    def read(self) -> bytes:
        """The encoded image.

        Raises:
            ValueError: it cannot be read; the message says why.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                if self.offset is None:
                    return file.read()
                content = read_run(file.fileno(), self.offset, self.length, Path(self.path))
        except IsADirectoryError:
            raise ValueError("it is a folder") from None
        except OSError as error:
            raise ValueError(f"it cannot be read: {error.strerror}") from error
        except DataError as error:
            raise ValueError(str(error)) from error
        return image_of_parts(content) if self.parts else content


class Stored(ABC):
    """A split.

    Attributes:
        split: its name.
        format: ``folder``, or of its shards.
        classes: their names, by number.
        labels: class numbers, int64, shape ``[images]``.
        shards: numbers of the shards that are there.
        total_bytes: of all images where that is known without reading them.
        numbers: of the images that can be looked for, int64.
        problems: names, and what is wrong with them.
        others: files that are no images.
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
        """The name of an image's file, where it has one."""

    @abstractmethod
    def name(self, number: int) -> str:
        """Where an image lies, for messages."""

    @abstractmethod
    def place(self, number: int) -> Place:
        """Where the encoded image lies."""

    def check_shard(self, number: int) -> list[tuple[str, str]]:
        """What is wrong with a shard as a whole; folders have none."""
        return []


class StoredFolder(Stored):
    """Class folders.

    Raises:
        DataError: the folder cannot be read.
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
        images = [n for n in names if n.lower().endswith(EXTENSIONS) and not n.startswith(".")]
        if len(images) < len(names):
            wanted = set(images)
            self.others += [f"{folder}/{name}" for name in names if name not in wanted]
        return images

    def file(self, number: int) -> str:
        """The name of the file."""
        return self._names[number]

    def name(self, number: int) -> str:
        """The path of the file."""
        return f"{self.folder}/{self._names[number]}"

    def place(self, number: int) -> Place:
        """The file."""
        return Place(self.name(number))


class StoredShards(Stored):
    """Shards with their index.

    Raises:
        DataError: the index cannot be read or is none.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder = folder
        self.split = split
        self.problems = []
        where = folder / INDEX
        try:
            self._index = index = Index.load(where.read_bytes(), str(where))
            listed = {INDEX, *index.shards}
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
                lost = f"with {counts[number]:,} images"
                self.problems.append((self._path(number), f"{error.strerror}, {lost}"))
        self.shards = there
        self.numbers = np.flatnonzero(np.isin(index.shard, there))
        self.total_bytes = int(index.length[self.numbers].sum())

    def _path(self, shard: int) -> str:
        return f"{self.folder}/{self._index.shards[shard]}"

    def file(self, number: int) -> str:
        """The name in the index."""
        return self._index.names[number]

    def name(self, number: int) -> str:
        """The path of the shard, a colon, and the name in the index."""
        return f"{self._path(int(self._index.shard[number]))}:{self._index.names[number]}"

    def place(self, number: int) -> Place:
        """The run of bytes that the index tells."""
        index = self._index
        return Place(
            self._path(int(index.shard[number])),
            int(index.offset[number]),
            int(index.length[number]),
            bool(index.split[number]),
        )

    def check_shard(self, number: int) -> list[tuple[str, str]]:
        """Its size and checksum against the index."""
        path, wanted = self._path(number), int(self._index.shard_bytes[number])
        digest = hashlib.sha256()
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != wanted:
                    return [(path, f"it has {size:,} bytes, not {wanted:,} as its index says")]
                if not (sha256 := self._index.shard_sha256[number]):
                    return []
                while piece := file.read(_READ_BYTES):
                    digest.update(piece)
        except OSError as error:
            return [(path, f"it cannot be read: {error.strerror}")]
        if digest.hexdigest() != sha256:
            return [(path, "its SHA-256 checksum is not that of its index")]
        return []


def stored_splits(path: Path) -> list[Stored]:
    """The splits at a path: those of a data set, or the one that the path is.

    Raises:
        DataError: there are none.
    """
    if not path.is_dir():
        raise DataError(f"no folder {path}: give a data set, or its folder train or val")
    names = [name for name in ("train", "val") if (path / name).is_dir()]
    found = [_stored(path / name, name) for name in names] or [_stored(path, path.name)]
    if not any(len(split) or split.problems for split in found):
        raise DataError(
            f"{path} holds no data set: it must have train/<class>/<image>.jpeg and "
            f"val/<class>/<image>.jpeg, or shards with their {INDEX} in train and val"
        )
    return found


def _stored(folder: Path, split: str) -> Stored:
    if (folder / INDEX).exists():
        return StoredShards(folder, split)
    shards = [p for p in folder.iterdir() if p.suffix in (".tar", ".tfrecord", ".rec")]
    if shards:
        raise DataError(
            f"{folder} has shards, as {shards[0].name}, and no {INDEX}: "
            f"largebatch data index {folder} writes it"
        )
    return StoredFolder(folder, split)
