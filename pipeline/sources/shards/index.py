"""The index of sharded images: where each of them lies, so that any can be read at any time.

In all three formats of shards an encoded image is one run of bytes in its shard, but for MXNet
records that hold their own magic number. One file, ``index.npz``, beside the shards of a split
tells all of them, so that a start does not read through a terabyte. It is NumPy's own format and
holds no pickled objects.
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

#: The index of a folder of shards.
INDEX = "index.npz"

_VERSION = 1


@dataclass(frozen=True, eq=False)
class Index:
    """Where each image of a split lies.

    Attributes:
        format: ``webdataset``, ``tfrecord`` or ``recordio``.
        classes: names of the classes, by number.
        shards: names of the files, relative to the folder of the index, ``[shards]``.
        shard_bytes: their sizes, int64, ``[shards]``.
        shard_sha256: their checksums in hexadecimal, or empty where not known, ``[shards]``.
        names: of the images, ``[images]``.
        labels: class numbers, int64, ``[images]``.
        shard: the number of the shard that each image is in, int64, ``[images]``.
        offset: of the encoded image in its shard, in bytes, int64, ``[images]``.
        length: of the encoded image, in bytes, int64, ``[images]``.
        split: True where ``offset`` and ``length`` are of a whole MXNet record in several parts,
            which must be put together again, bool, ``[images]``.
    """

    format: str
    classes: tuple[str, ...]
    shards: tuple[str, ...]
    shard_bytes: NDArray[np.int64]
    shard_sha256: tuple[str, ...]
    names: tuple[str, ...]
    labels: NDArray[np.int64]
    shard: NDArray[np.int64]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    split: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of names and labels in order."""
        content = "\n".join([*self.classes, "", *self.names]).encode()
        labels = np.ascontiguousarray(self.labels, dtype="<i8").tobytes()
        return hashlib.sha256(content + labels).hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it, whole or not at all.

        Raises:
            DataError: a name has a line break in it.
        """
        for name in (*self.classes, *self.shards, *self.names):
            if "\n" in name:
                raise DataError(f"the name {name!r} has a line break in it: rename it")
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        arrays: dict[str, Any] = {f.name: _as_array(getattr(self, f.name)) for f in fields(self)}
        with partial.open("wb") as file:
            np.savez_compressed(file, version=np.array(_VERSION), **arrays)
        os.replace(partial, path)

    @classmethod
    def load(cls, content: bytes, where: str) -> Index:
        """Read what :meth:`save` wrote.

        Args:
            content: of the file.
            where: its name, for messages.

        Raises:
            DataError: it is not an index.
        """
        advice = "largebatch data index FOLDER writes one"
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                version = int(arrays["version"])
                found = {name: arrays[name] for name in arrays.files if version == _VERSION}
            if version == _VERSION:
                index = cls._of(found)
        except Exception as error:  # NumPy says in a dozen ways that a file is damaged
            raise DataError(f"{where} is not an index of shards ({error}); {advice}") from error
        if version != _VERSION:
            raise DataError(
                f"{where} is of version {version}, this library reads {_VERSION}; {advice}"
            )
        return index

    @classmethod
    def _of(cls, found: dict[str, NDArray[Any]]) -> Index:
        """Made of its arrays, and held to what it says of itself.

        Raises:
            ValueError: it is damaged.
        """
        values: dict[str, Any] = {"format": str(found["format"])}
        for name in ("classes", "shards", "shard_sha256", "names"):
            values[name] = _as_names(found[name])
        for name in ("shard_bytes", "labels", "shard", "offset", "length"):
            values[name] = found[name].astype(np.int64)
        index = cls(**values, split=found["split"].astype(np.bool_))
        images, shards = len(index.names), len(index.shards)
        of_images = (index.labels, index.shard, index.offset, index.length, index.split)
        if not images or any(array.shape != (images,) for array in of_images):
            raise ValueError("it has no images, or more of one thing than of another")
        if index.shard_bytes.shape != (shards,) or len(index.shard_sha256) != shards:
            raise ValueError("it has more of one thing than of another")
        if not 0 <= index.shard.min() <= index.shard.max() < shards:
            raise ValueError("it has images in shards that it does not have")
        # Notes of an unfinished data set leave the classes out.
        if index.labels.min() < 0 or (index.classes and index.labels.max() >= len(index.classes)):
            raise ValueError("it has labels that are no classes of its own")
        end = index.offset + index.length
        if (
            min(index.offset.min(), index.length.min()) < 0
            or (end > index.shard_bytes[index.shard]).any()
        ):
            raise ValueError("it has images outside of their shards")
        return index


def _as_array(value: object) -> NDArray[np.generic]:
    """Texts as bytes of UTF-8, which take a quarter of NumPy's own texts."""
    if isinstance(value, tuple):
        return np.frombuffer("".join(f"{text}\n" for text in value).encode(), dtype=np.uint8)
    return np.asarray(value)


def _as_names(content: NDArray[np.uint8]) -> tuple[str, ...]:
    return tuple(content.tobytes().decode().split("\n")[:-1])
