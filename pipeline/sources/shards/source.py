"""Images in shards, here or on a server, any of which can be read at any time."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..base import Encoded
from ..storage.local import ByteRange, LocalStorage, Storage
from ..storage.remote import SCHEMES, RemoteStorage
from ..storage.retries import Retries
from .index import INDEX, Index
from .indexing import SCANNERS, are_numbers, index_shards
from .recordio import image_of_parts


class Shards:
    """The images of one split of a data set in shards.

    Where ``root/split/index.npz`` is (:func:`index_shards` makes it), it tells where the images
    are, and every shard must be there with the size that it says. Without one, local shards are
    scanned at the start, in the order of their names. Shards on a server need their index.

    Args:
        root: a local folder, or a URL that begins with ``http://``, ``https://`` or ``s3://``.
        split: ``"train"`` or ``"val"``, the folder of the shards in ``root``.
        format: ``webdataset``, ``tfrecord`` or ``recordio``.
        pattern: which files are shards, relative to ``root``, as for :func:`index_shards`; they
            are scanned at the start. For local shards that do not lie in a folder per split.
        classes: their names, to number them as another split does; by default those of the index.
        label_offset: what shards that are scanned count classes from, as for
            :func:`index_shards`; an index counts from 0.
        storage_options: for fsspec, where ``root`` is a URL; see :class:`RemoteStorage`.
        retries: what is done when a server fails.

    Raises:
        DataError: there are no shards, one is missing or not as the index says, or a class is
            unknown.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "train",
        *,
        format: str,
        pattern: str | None = None,
        classes: tuple[str, ...] | None = None,
        label_offset: int = 0,
        storage_options: dict[str, Any] | None = None,
        retries: Retries | None = None,
    ) -> None:
        if format not in SCANNERS:
            raise DataError(
                f"there is no format of shards {format!r}: one of {', '.join(SCANNERS)}"
            )
        self.kind = format
        folder = os.fspath(root)
        folder = folder if pattern is not None else f"{folder.rstrip('/')}/{split}"
        self._storage = _storage(folder, storage_options, retries)
        remote = isinstance(self._storage, RemoteStorage)
        index = None if pattern is not None else _load(self._storage, format)
        if index is None:
            if remote:
                raise DataError(
                    f"no index {self._storage.where(INDEX)}: shards on a server need one; make it "
                    "with largebatch data index FOLDER where they are local, and put it beside them"
                )
            if not os.path.isdir(folder):
                raise DataError(f"no data folder {folder}: it must hold the shards, {format}")
            index = index_shards(
                Path(folder), format, pattern=pattern, classes=classes, label_offset=label_offset
            )
        elif classes is not None:
            index = _renumbered(index, classes, self._storage.where(INDEX))
        self._index = index
        self.classes: tuple[str, ...] = index.classes
        self.labels: NDArray[np.int64] = index.labels

    def __len__(self) -> int:
        return len(self._index)

    @property
    def fingerprint(self) -> str:
        """A hash of names and labels in order; it does not depend on where the shards are."""
        return self._index.fingerprint

    def name(self, index: int) -> str:
        """The path or URL of the shard, a colon, and the image's name in it."""
        shard = self._index.shards[self._index.shard[index]]
        return f"{self._storage.where(shard)}:{self._index.names[index]}"

    def read(self, indices: NDArray[np.int64]) -> list[Encoded | DataError]:
        """The bytes of images, or why one of them cannot be read; shape ``[len(indices)]``."""
        index = self._index
        found = self._storage.read(
            [
                ByteRange(index.shards[shard], offset, length)
                for shard, offset, length in zip(
                    index.shard[indices].tolist(),
                    index.offset[indices].tolist(),
                    index.length[indices].tolist(),
                    strict=True,
                )
            ]
        )
        return [
            self._whole(number, content)
            for number, content in zip(indices.tolist(), found, strict=True)
        ]

    def _whole(self, number: int, content: Encoded | str) -> Encoded | DataError:
        if not isinstance(content, str) and self._index.split[number]:
            try:
                return np.frombuffer(bytearray(image_of_parts(content.tobytes())), np.uint8)
            except ValueError as error:
                content = f"cannot be read: {error}"
        if isinstance(content, str):
            return DataError(f"{self.name(number)} {content}")
        return content


def _storage(folder: str, options: dict[str, Any] | None, retries: Retries | None) -> Storage:
    if folder.startswith(SCHEMES):
        return RemoteStorage(folder, options, retries)
    if "://" in folder:
        raise DataError(f"{folder} cannot be read: URLs begin with {', '.join(SCHEMES)}")
    return LocalStorage(folder)


def _load(storage: Storage, format: str) -> Index | None:
    """The index beside the shards, if there is one and they are as it says."""
    content = storage.content(INDEX)
    if content is None:
        return None
    where = storage.where(INDEX)
    index = Index.load(content, where)
    if index.format != format:
        raise DataError(f"{where} is of shards of {index.format}, not of {format}")
    missing = []
    for shard, size, found in zip(
        index.shards, index.shard_bytes.tolist(), storage.sizes(index.shards), strict=True
    ):
        if found is None:
            missing.append(storage.where(shard))
        elif found != size:
            raise DataError(
                f"{storage.where(shard)} has {found:,} bytes, but {size:,} in {where}: copy the "
                "shard again, or write the index anew with largebatch data index FOLDER"
            )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"{missing[0]}{more} of {len(index.shards)} shards of {where} are not there"
        )
    return index


def _renumbered(index: Index, classes: tuple[str, ...], where: str) -> Index:
    """The same with the numbers of other classes."""
    if are_numbers(index.classes):
        # Shards that tell no names have numbers that are taken to mean the same everywhere.
        if len(index.classes) > len(classes):
            raise DataError(
                f"{where} has {len(index.classes)} classes, the training images {len(classes)}"
            )
        return replace(index, classes=classes)
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in index.classes if name not in numbers]
    if unknown:
        raise DataError(
            f"class {unknown[0]} of {where} is no class of the training images "
            f"({len(classes)} classes, {classes[0]} to {classes[-1]})"
        )
    table = np.array([numbers[name] for name in index.classes], dtype=np.int64)
    return replace(index, classes=classes, labels=table[index.labels])
