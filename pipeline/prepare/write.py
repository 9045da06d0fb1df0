"""Write a unit of images, and put down a note when its files are whole.

The note has the form of an index: the files with sizes and checksums, and where the images are in
them. A later call takes those units as done whose files are as their notes say.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..progress import Meter
from ..sources import Index
from .images import SIGNATURE_BYTES, begins_as_image
from .output import Output
from .shrink import shrink
from .units import Unit, as_jpeg
from .workplace import Workplace
from .writers import Entry, Placed, ShardFormat

_READ_BYTES = 4 * 2**20


class Writer:
    """Writes units into the folder of a data set.

    Args:
        place: the folder.
        output: how to write.
        form: of shards; None for folders.
    """

    def __init__(self, place: Workplace, output: Output, form: ShardFormat | None) -> None:
        self._place = place
        self._output = output
        self._form = form

    def write(self, unit: Unit, meter: Meter) -> Index:
        """Write a unit, or find it whole; its files, and where the images are in them."""
        folder = self._place.work / unit.images.split
        where = self._place.notes / f"{unit.title}.npz"
        note = _whole(where, folder)
        if note is not None:
            meter.add(len(unit.numbers), unit.bytes)
            return note
        note = (
            self._files(unit, folder, meter)
            if self._form is None
            else self._shard(unit, folder, meter, self._form)
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

    def _shard(self, unit: Unit, folder: Path, meter: Meter, form: ShardFormat) -> Index:
        path = folder / f"{unit.title}{form.suffix}"
        partial = path.with_name(f".{path.name}.partial")
        digest = hashlib.sha256()
        at = 0
        placed: list[Placed] = []
        with partial.open("wb", buffering=0) as file:

            def put(content: bytes) -> None:
                nonlocal at
                digest.update(content)
                at += len(content)
                while content:
                    content = content[file.write(content) :]

            for number, name, content in self._contents(unit, meter):
                label = int(unit.images.labels[number])
                record = form.record(
                    Entry(
                        unit.first + len(placed), name, label, unit.images.classes[label], content
                    )
                )
                image_at = at + len(record.before)
                placed.append(Placed(name, label, at, len(record), image_at, len(record.image)))
                put(record.before + record.image + record.after)
            put(form.closing(at))
        os.replace(partial, path)
        text = form.idx(placed).encode()
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
        )

    def _contents(self, unit: Unit, meter: Meter) -> Iterator[tuple[int, str, bytes]]:
        """Number, name and content of each image as it is written."""
        images, output = unit.images, self._output
        for number in unit.numbers.tolist():
            name = unit.names[number]
            content = images.read(number)
            if not begins_as_image(content[:SIGNATURE_BYTES]):
                raise DataError(
                    f"{images.split}/{images.names[number]} "
                    f"{'does not begin as an image does' if content else 'is empty'}: remove it; "
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
                    name, content = as_jpeg(name), smaller
            yield number, name, content
            meter.add(1, int(images.sizes[number]))


def _whole(where: Path, folder: Path) -> Index | None:
    """The note of a unit whose files are all as it says."""
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
