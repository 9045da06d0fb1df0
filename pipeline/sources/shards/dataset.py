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
from ..base import Encoded, ImageSource
from ..faults import UNUSED, Fault, OnFault, no_class_of, refuse
from ..storage.local import ByteRange, LocalStorage, Storage
from ..storage.remote import RemoteStorage
from ..storage.retries import Retries
from ..storage.urls import SCHEMES, query_of, without_secrets
from .index import INDEX_FILE, Index
from .indexing import SCANNERS, are_unnamed, index_shards
from .recordio import image_of_parts
from .stale import stale_shards


class Shards(ImageSource):
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
        on_fault: Called with each fault (:mod:`~largebatch.pipeline.sources.faults`): a shard that
            is missing or disagrees with the index, or a class that ``classes`` does not have, which
            is added at their end if this does not raise. The default raises.

    Attributes:
        index: The positions of the images in the shards.
        storage: The folder of the shards.

    Raises:
        DataError: There are no shards, or ``on_fault`` refuses a fault.
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
        on_fault: OnFault = refuse,
    ) -> None:
        if format not in SCANNERS:
            raise DataError(f"unknown shard format {format!r}; valid: {', '.join(SCANNERS)}")
        self.kind = format
        folder = os.fspath(root)
        if pattern is None:
            query = query_of(folder)
            folder = f"{folder.removesuffix(query).rstrip('/')}/{split}{query}"
        self.storage = _storage(folder, storage_options, retries)
        remote = isinstance(self.storage, RemoteStorage)
        index = None if pattern is not None else _load(self.storage, format, on_fault)
        if index is None:
            if remote:
                raise DataError(
                    f"no index {self.storage.where(INDEX_FILE)}: shards on a server need one; "
                    "write it with largebatch data index FOLDER where they are local, and copy it "
                    "beside them"
                )
            if not os.path.isdir(folder):
                raise DataError(f"no data folder {folder}; valid: a folder of {format} shards")
            index = index_shards(
                Path(folder), format, pattern=pattern, classes=classes, label_offset=label_offset
            )
        elif classes is not None:
            index = _renumbered(index, classes, self.storage.where(INDEX_FILE), on_fault)
        if classes is None and (what := index.unused_classes):
            unused = len(index.classes) - len(np.unique(index.labels))
            on_fault(Fault(folder, what, UNUSED, unused))
        self.index = index
        self.classes: tuple[str, ...] = index.classes
        self.labels: NDArray[np.int64] = index.labels

    def __len__(self) -> int:
        return len(self.index)

    def where(self, shard: int) -> str:
        """Return the path or URL of a shard."""
        return self.storage.where(self.index.shards[shard])

    @property
    def fingerprint(self) -> str:
        return self.index.fingerprint

    def name(self, index: int) -> str:
        """Return the path or URL of the shard, a colon, and the image's name in it."""
        return f"{self.where(self.index.shard[index])}:{self.index.names[index]}"

    def read(self, indices: NDArray[np.int64]) -> list[Encoded | DataError]:
        """Read images; if the index has checksums, other bytes than it was made of are an error."""
        index = self.index
        places = (a[indices].tolist() for a in (index.shard, index.offset, index.length))
        wanted = [ByteRange(index.shards[shard], *at) for shard, *at in zip(*places, strict=True)]
        found = self.storage.read(wanted)
        return [self._checked(n, c) for n, c in zip(indices.tolist(), found, strict=True)]

    def _checked(self, number: int, content: Encoded | str) -> Encoded | DataError:
        """Return the image in the bytes of its range, or why it cannot be read."""
        if isinstance(content, str):
            return DataError(f"{self.name(number)} {content}")
        crc32 = self.index.crc32
        if crc32 is not None and zlib.crc32(content.data) != crc32[number]:
            return DataError(
                f"{self.name(number)} cannot be read: its bytes are not those that the index was "
                "made of (CRC-32); if they are right, write the index again with largebatch data "
                "index FOLDER"
            )
        if not self.index.split[number]:
            return content
        try:
            return np.frombuffer(bytearray(image_of_parts(content.tobytes())), np.uint8)
        except ValueError:
            return DataError(f"{self.name(number)} cannot be read: its record is damaged")


def _storage(folder: str, options: dict[str, Any] | None, retries: Retries | None) -> Storage:
    if folder.startswith(SCHEMES):
        return RemoteStorage(folder, options, retries)
    if "://" in folder:
        raise DataError(
            f"{without_secrets(folder)} cannot be read; valid: URLs that start with "
            f"{', '.join(SCHEMES)}"
        )
    return LocalStorage(folder)


def _load(storage: Storage, format: str, on_fault: OnFault) -> Index | None:
    """Load the index beside the shards, if there is one, and check the shards against it."""
    content = storage.content(INDEX_FILE)
    if content is None:
        return None
    where = storage.where(INDEX_FILE)
    index = Index.load(content, where)
    if index.format != format:
        raise DataError(f"{where} is an index of {index.format} shards, not {format}")
    sizes = storage.sizes(index.shards)
    intact = []
    wanted = zip(index.shards, index.shard_bytes.tolist(), sizes, strict=True)
    for number, (shard, size, found) in enumerate(wanted):
        if found is None:
            lost = int((index.shard == number).sum())
            all_ = f"{sizes.count(None)} of {len(sizes)} shards of {where} are"
            on_fault(Fault(storage.where(shard), f"is missing ({all_}): {lost:,} images lost"))
        elif found != size:
            what = (
                f"has {found:,} bytes, but {size:,} in {where}: copy the shard again, or write the "
                "index again with largebatch data index FOLDER"
            )
            on_fault(Fault(storage.where(shard), what))
        else:
            intact.append(number)
    for shard, what in stale_shards(index, storage, intact):
        on_fault(Fault(storage.where(shard), what))
    return index


def _renumbered(index: Index, classes: tuple[str, ...], where: str, on_fault: OnFault) -> Index:
    """Return the index with the numbers of other class names, after which come its own others."""
    if are_unnamed(index.classes):
        # Without class names, class numbers are taken to mean the same in both splits.
        if len(index.classes) > len(classes):
            what = f"has {len(index.classes)} classes, but training has {len(classes)}"
            on_fault(Fault(where, what))
        return replace(index, classes=(*classes, *index.classes[len(classes) :]))
    known = set(classes)
    unknown = [name for name in index.classes if name not in known]
    for name in unknown:
        on_fault(Fault(f"class {name} of {where}", no_class_of(classes)))
    numbers = {name: number for number, name in enumerate((*classes, *unknown))}
    table = np.array([numbers[name] for name in index.classes], dtype=np.int64)
    return replace(index, classes=(*classes, *unknown), labels=table[index.labels])
