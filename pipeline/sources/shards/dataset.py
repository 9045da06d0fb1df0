"""The source of images in shards, local or on a server, with random access."""

from __future__ import annotations

import os
import zlib
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
from .index import INDEX_FILE, Index
from .indexing import SCANNERS, are_unnamed, index_shards
from .recordio import image_of_parts
from .stale import stale_shards


class Shards:
    """The images of one split of a data set in shards.

    If ``root/split/index.npz`` exists (:func:`index_shards` makes it), it gives the positions of
    the images, and every shard must exist with the size in the index, and with the images where it
    says (:mod:`~largebatch.pipeline.sources.shards.stale`). Without an index, local shards are
    scanned at the start, in the order of their names. Shards on a server need an index.

    Args:
        root: A local folder, or a URL that starts with ``http://``, ``https://`` or ``s3://``.
        split: ``"train"`` or ``"val"``, the folder of the shards in ``root``.
        format: ``webdataset``, ``tfrecord`` or ``recordio``.
        pattern: Names of the shards relative to ``root``, as for :func:`index_shards`, for local
            shards that are not in one folder per split; these are scanned at the start.
        classes: Class names by number, to number them as another split does; by default those of
            the index.
        label_offset: Label of the first class in shards that are scanned, as for
            :func:`index_shards`; the labels of an index start from 0.
        storage_options: Options for fsspec if ``root`` is a URL; see :class:`RemoteStorage`.
        retries: The handling of failed requests to a server.

    Raises:
        DataError: There are no shards, a shard is missing or disagrees with the index, or a class
            is unknown.
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
            raise DataError(f"unknown shard format {format!r}; valid: {', '.join(SCANNERS)}")
        self.kind = format
        folder = os.fspath(root)
        folder = folder if pattern is not None else f"{folder.rstrip('/')}/{split}"
        self._storage = _storage(folder, storage_options, retries)
        remote = isinstance(self._storage, RemoteStorage)
        index = None if pattern is not None else _load(self._storage, format)
        if index is None:
            if remote:
                raise DataError(
                    f"no index {self._storage.where(INDEX_FILE)}: shards on a server need one; "
                    "write it with largebatch data index FOLDER where they are local, and copy it "
                    "beside them"
                )
            if not os.path.isdir(folder):
                raise DataError(f"no data folder {folder}; valid: a folder of {format} shards")
            index = index_shards(
                Path(folder), format, pattern=pattern, classes=classes, label_offset=label_offset
            )
        elif classes is not None:
            index = _renumbered(index, classes, self._storage.where(INDEX_FILE))
        self._index = index
        self.classes: tuple[str, ...] = index.classes
        self.labels: NDArray[np.int64] = index.labels

    def __len__(self) -> int:
        return len(self._index)

    @property
    def fingerprint(self) -> str:
        """Hash of names and labels in order; it does not depend on where the shards are."""
        return self._index.fingerprint

    def name(self, index: int) -> str:
        """Return the path or URL of the shard, a colon, and the image's name in it."""
        shard = self._index.shards[self._index.shard[index]]
        return f"{self._storage.where(shard)}:{self._index.names[index]}"

    def read(self, indices: NDArray[np.int64]) -> list[Encoded | DataError]:
        """Read images; for each its bytes, or why it cannot be read.

        If the index has checksums, other bytes than it was made of are an error.
        """
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
            self._join_parts(number, content)
            for number, content in zip(indices.tolist(), found, strict=True)
        ]

    def _join_parts(self, number: int, content: Encoded | str) -> Encoded | DataError:
        crc32 = self._index.crc32
        if crc32 is None or isinstance(content, str):
            pass
        elif zlib.crc32(content.data) != crc32[number]:
            content = (
                "cannot be read: its bytes are not those that the index was made of (CRC-32); if "
                "they are right, write the index again with largebatch data index FOLDER"
            )
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
        raise DataError(
            f"{folder} cannot be read; valid: URLs that start with {', '.join(SCHEMES)}"
        )
    return LocalStorage(folder)


def _load(storage: Storage, format: str) -> Index | None:
    """Load the index beside the shards, if there is one, and check the shards against it."""
    content = storage.content(INDEX_FILE)
    if content is None:
        return None
    where = storage.where(INDEX_FILE)
    index = Index.load(content, where)
    if index.format != format:
        raise DataError(f"{where} is an index of {index.format} shards, not {format}")
    missing = []
    for shard, size, found in zip(
        index.shards, index.shard_bytes.tolist(), storage.sizes(index.shards), strict=True
    ):
        if found is None:
            missing.append(storage.where(shard))
        elif found != size:
            raise DataError(
                f"{storage.where(shard)} has {found:,} bytes, but {size:,} in {where}: copy the "
                "shard again, or write the index again with largebatch data index FOLDER"
            )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(f"{missing[0]}{more} of {len(index.shards)} shards of {where} are missing")
    for shard, what in stale_shards(index, storage, range(len(index.shards))):
        raise DataError(f"{storage.where(shard)} {what}")
    return index


def _renumbered(index: Index, classes: tuple[str, ...], where: str) -> Index:
    """Return the index with the class numbers of other class names."""
    if are_unnamed(index.classes):
        # Without class names, class numbers are taken to mean the same in both splits.
        if len(index.classes) > len(classes):
            raise DataError(
                f"{where} has {len(index.classes)} classes, but training has {len(classes)}"
            )
        return replace(index, classes=classes)
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in index.classes if name not in numbers]
    if unknown:
        raise DataError(
            f"class {unknown[0]} of {where} is not a class of the training images "
            f"({len(classes)} classes, {classes[0]} to {classes[-1]})"
        )
    table = np.array([numbers[name] for name in index.classes], dtype=np.int64)
    return replace(index, classes=classes, labels=table[index.labels])
