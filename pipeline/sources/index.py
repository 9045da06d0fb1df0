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
import zipfile
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError

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
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                version = int(arrays["version"])
                found = {field.name: arrays[field.name] for field in fields(cls)}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{where} is not an index of shards ({error}); "
                "largebatch data index FOLDER writes one"
            ) from error
        if version != _VERSION:
            raise DataError(
                f"{where} is of version {version}, this library reads {_VERSION}; "
                "largebatch data index FOLDER writes one"
            )
        values: dict[str, Any] = {"format": str(found["format"])}
        for name in ("classes", "shards", "shard_sha256", "names"):
            values[name] = _as_names(found[name])
        for name in ("shard_bytes", "labels", "shard", "offset", "length"):
            values[name] = found[name].astype(np.int64)
        return cls(**values, split=found["split"].astype(np.bool_))


def _as_array(value: object) -> NDArray[np.generic]:
    """Texts as bytes of UTF-8, which take a quarter of NumPy's own texts."""
    if isinstance(value, tuple):
        return np.frombuffer("".join(f"{text}\n" for text in value).encode(), dtype=np.uint8)
    return np.asarray(value)


def _as_names(content: NDArray[np.uint8]) -> tuple[str, ...]:
    return tuple(content.tobytes().decode().split("\n")[:-1])
