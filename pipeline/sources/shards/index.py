"""The index of sharded images, which gives random access to them.

In all three shard formats an encoded image is one byte range of its shard, except for MXNet records
that contain their own magic number. The file ``index.npz`` beside the shards of a split lists all
of them, so that starting a run does not require a scan of a terabyte. It is in NumPy's own format
and holds no pickled objects.
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..base import check_inside

#: File name of the index of a folder of shards.
INDEX_FILE = "index.npz"

_VERSION = 1


@dataclass(frozen=True, eq=False)
class Index:
    """The position of each image of a split in its shards; what is unknown is None."""

    format: str  #: ``webdataset``, ``tfrecord`` or ``recordio``.
    classes: tuple[str, ...]  #: Class names, by class number.
    shards: tuple[str, ...]  #: Names of the shards, relative to the folder of the index.
    shard_bytes: NDArray[np.int64]  #: Sizes of the shards, ``[shards]``.
    names: tuple[str, ...]  #: Names of the images, ``[images]``.
    labels: NDArray[np.int64]  #: Class numbers, ``[images]``.
    shard: NDArray[np.int64]  #: Number of the shard of each image, ``[images]``.
    offset: NDArray[np.int64]  #: Of the encoded image in its shard, in bytes, ``[images]``.
    length: NDArray[np.int64]  #: Of the encoded image, in bytes, ``[images]``.
    #: Whether these two are of an MXNet record in parts that must be joined, ``[images]``.
    split: NDArray[np.bool_]
    #: Last change of the shards in nanoseconds since 1970, ``[shards]``.
    shard_times: NDArray[np.int64] | None = None
    #: Label of the first class in the shards, ``[]``.
    label_offset: NDArray[np.int64] | None = None
    crc32: NDArray[np.uint32] | None = None  #: CRC-32 of each byte range, ``[images]``.

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of names and labels in order."""
        content = "\n".join([*self.classes, "", *self.names]).encode()
        labels = np.ascontiguousarray(self.labels, dtype="<i8").tobytes()
        return hashlib.sha256(content + labels).hexdigest()[:16]

    @property
    def unused_classes(self) -> str:
        """A line that says how many classes have no images; empty if all have."""
        used = len(np.unique(self.labels))
        if used == len(self.classes):
            return ""
        return f"only {used:,} of {len(self.classes):,} classes have images"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a file atomically.

        Raises:
            DataError: A name contains a line break.
        """
        for name in (*self.classes, *self.shards, *self.names):
            if "\n" in name:
                raise DataError(f"the name {name!r} contains a line break: rename it")
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays: dict[str, Any] = {n: _as_array(v) for n, v in values.items() if v is not None}
        with partial.open("wb") as file:
            np.savez_compressed(file, version=np.array(_VERSION), **arrays)
        os.replace(partial, path)

    @classmethod
    def load(cls, content: bytes, where: str) -> Index:
        """Parse the content of a file that :meth:`save` has written.

        Raises:
            DataError: The content is not an index; the message names the file by ``where``.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                found = dict(file)
            version = int(found["version"])
            if version != _VERSION:
                raise ValueError(f"it has version {version}, and {_VERSION} is read")
            return cls._of(found)
        except Exception as error:  # zipfile has many exceptions for damaged files
            advice = "write it with largebatch data index FOLDER"
            raise DataError(f"{where} is not an index of shards ({error}); {advice}") from error

    @classmethod
    def _of(cls, found: dict[str, NDArray[Any]]) -> Index:
        """Make it of its arrays; raises an exception if they contradict each other."""
        values: dict[str, Any] = {"format": str(found["format"])}
        for name in ("shard_bytes", "labels", "shard", "offset", "length"):
            values[name] = found[name]
            if values[name].dtype != np.int64:
                raise ValueError(f"{name} is {values[name].dtype}; valid: int64")
        for name in ("names", "classes", "shards"):
            values[name] = _as_names(found[name])
        for name in {"shard_times", "label_offset", "crc32"} & found.keys():
            values[name] = found[name].astype(np.uint32 if name == "crc32" else np.int64)
        index = cls(**values, split=found["split"].astype(np.bool_))
        for shard in index.shards:
            check_inside(shard, "it")
        images, shards = len(index.names), len(index.shards)
        of_images = index.labels, index.shard, index.offset, index.length, index.split, index.crc32
        of_shards = index.shard_bytes, index.shard_times
        for arrays, count in ((of_images, images), (of_shards, shards)):
            if not count or any(a is not None and a.shape != (count,) for a in arrays):
                raise ValueError("it has no images, or arrays of different lengths")
        if not 0 <= index.shard.min() <= index.shard.max() < shards:
            raise ValueError("it has images in unknown shards")
        # The notes of an unfinished data set have no classes.
        if index.labels.min() < 0 or (index.classes and index.labels.max() >= len(index.classes)):
            raise ValueError("it has labels without a class")
        # Of two numbers from 0 on the difference does not overflow, as a sum may.
        left = index.shard_bytes[index.shard] - index.offset
        least = min(index.offset.min(), index.length.min(), index.shard_bytes.min())
        if least < 0 or (index.length > left).any():
            raise ValueError("it has images beyond the end of their shards")
        return index


def _as_array(value: object) -> NDArray[np.generic]:
    """Convert a value to an array; strings to UTF-8 bytes, a quarter of the size of NumPy's."""
    if isinstance(value, tuple):
        return np.frombuffer("".join(f"{text}\n" for text in value).encode(), dtype=np.uint8)
    return np.asarray(value)


def _as_names(content: NDArray[np.uint8]) -> tuple[str, ...]:
    return tuple(line[:-1].decode() for line in io.BytesIO(content.tobytes()))
