"""Writing a unit of images, followed by a note once its files are complete.

The note has the format of an index: the files with their sizes and checksums, and the positions of
the images in them. A later call skips the units whose files agree with their notes.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..progress import Meter
from ..sources import Index
from .images import SIGNATURE_BYTES, has_image_signature
from .output import Output
from .shrink import shrink
from .units import Unit, jpeg_name
from .work_dir import WorkDir
from .writers import PlacedRecord, Sample, ShardFormat

_READ_BYTES = 4 * 2**20


class Writer:
    """Writes units into the folder of a data set.

    Args:
        work_dir: The folder of the data set.
        output: The format to write.
        shard_format: The format of shards; None for class folders.
    """

    def __init__(self, work_dir: WorkDir, output: Output, shard_format: ShardFormat | None) -> None:
        self._work_dir = work_dir
        self._output = output
        self._shard_format = shard_format

    def write(self, unit: Unit, meter: Meter) -> Index:
        """Write a unit unless an earlier call has; return its note."""
        folder = self._work_dir.work / unit.images.split
        where = self._work_dir.notes / f"{unit.title}.npz"
        note = _read_note(where, folder)
        if note is not None:
            meter.add(len(unit.numbers), unit.bytes)
            return note
        note = (
            self._files(unit, folder, meter)
            if self._shard_format is None
            else self._shard(unit, folder, meter, self._shard_format)
        )
        note.save(where)
        return note

    def _files(self, unit: Unit, folder: Path, meter: Meter) -> Index:
        names, sizes, hashes = [], [], []
        for _, name, content in self._contents(unit, meter):
            (folder / name).write_bytes(content)
            names.append(name)
            sizes.append(len(content))
            hashes.append(hashlib.sha256(content).hexdigest())
        count = len(names)
        return Index(
            format="folder",
            classes=(),
            shards=tuple(names),
            shard_bytes=np.array(sizes, np.int64),
            shard_sha256=tuple(hashes),
            names=tuple(names),
            labels=unit.images.labels[unit.numbers],
            shard=np.arange(count),
            offset=np.zeros(count, np.int64),
            length=np.array(sizes, np.int64),
            split=np.zeros(count, np.bool_),
        )

    def _shard(self, unit: Unit, folder: Path, meter: Meter, shard_format: ShardFormat) -> Index:
        path = folder / f"{unit.title}{shard_format.suffix}"
        partial = path.with_name(f".{path.name}.partial")
        digest = hashlib.sha256()
        at = 0
        placed: list[PlacedRecord] = []
        crc32: list[int] = []
        with partial.open("wb", buffering=0) as file:

            def put(content: bytes) -> None:
                nonlocal at
                digest.update(content)
                at += len(content)
                while content:
                    content = content[file.write(content) :]

            for number, name, content in self._contents(unit, meter):
                label = int(unit.images.labels[number])
                record = shard_format.record(
                    Sample(name, label, unit.images.classes[label], content)
                )
                image_at = at + len(record.before)
                placed.append(
                    PlacedRecord(name, label, at, len(record), image_at, len(record.image))
                )
                crc32.append(zlib.crc32(record.image))
                put(record.before + record.image + record.after)
            put(shard_format.footer(at))
        os.replace(partial, path)
        text = shard_format.idx(placed).encode()
        idx = path.with_suffix(".idx")
        partial.write_bytes(text)
        os.replace(partial, idx)
        return Index(
            format=self._output.format,
            classes=(),
            shards=(path.name, idx.name),
            shard_bytes=np.array([at, len(text)], np.int64),
            shard_sha256=(digest.hexdigest(), hashlib.sha256(text).hexdigest()),
            names=tuple(p.name for p in placed),
            labels=unit.images.labels[unit.numbers],
            shard=np.zeros(len(placed), np.int64),
            offset=np.array([p.offset for p in placed], np.int64),
            length=np.array([p.length for p in placed], np.int64),
            split=np.zeros(len(placed), np.bool_),
            label_offset=np.array(0),
            crc32=np.array(crc32, np.uint32),
        )

    def _contents(self, unit: Unit, meter: Meter) -> Iterator[tuple[int, str, bytes]]:
        """Yield number, name and content of each image to be written."""
        images, output = unit.images, self._output
        for number in unit.numbers.tolist():
            name = unit.names[number]
            content = images.read(number)
            if not has_image_signature(content[:SIGNATURE_BYTES]):
                raise DataError(
                    f"{images.split}/{images.names[number]} "
                    f"{'does not start as an image file' if content else 'is empty'}: remove it; "
                    "largebatch data check lists all such images of a folder"
                )
            if output.resize is not None:
                try:
                    smaller = shrink(content, output.resize, output.quality)
                except ValueError as error:
                    raise DataError(
                        f"{images.split}/{images.names[number]} cannot be decoded: {error}"
                    ) from error
                if smaller is not None:
                    name, content = jpeg_name(name), smaller
            yield number, name, content
            meter.add(1, int(images.sizes[number]))


def _read_note(where: Path, folder: Path) -> Index | None:
    """Return the note of a unit, or None if there is none or its files do not agree with it."""
    try:
        note = Index.load(where.read_bytes(), str(where))
        for name, size, sha256 in zip(
            note.shards, note.shard_bytes, note.shard_sha256, strict=True
        ):
            path = folder / name
            if path.stat().st_size != size or _sha256(path) != sha256:
                return None
    except (OSError, DataError):
        return None
    return note


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()
