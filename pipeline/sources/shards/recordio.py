"""MXNet RecordIO shards: where the images are in a ``.rec`` file.

A record is a magic number, a word of three flag bits and 29 bits of length, and the payload,
padded to four bytes. A payload that holds the magic number at a multiple of four bytes is cut
there into several parts, each framed so, and the magic number left out (dmlc-core,
``src/recordio.cc``). The payload is MXNet's ``IRHeader`` (flag, label, two ids), as many float
labels as the flag says, and the encoded image (MXNet, ``python/mxnet/recordio.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from ...errors import DataError
from .shard_file import Entry, ShardFile, idx_of, read_idx

_MAGIC = struct.pack("<I", 0xCED7230A)
_FRAME = struct.Struct("<4sI")
_HEADER = struct.Struct("<IfQQ")
_LENGTH_BITS = 29
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)


def scan(path: Path, *, verify: bool = False) -> Iterator[Entry]:
    """The images of a shard, in the order in which they lie in it, which is DALI's.

    Where there is an index ``.idx`` ("key offset" a line), only the records it lists are taken:
    MXNet's readers know no others. Records that have labels and no image, in which data sets of
    faces keep what they tell about themselves, are left out. Of several labels the first is the
    class.

    Args:
        path: of the shard.
        verify: has no effect: RecordIO has no checksums.

    Raises:
        DataError: it is not RecordIO, it is cut off, its index is of another shard, or a label is
            no class number.
    """
    with ShardFile(path) as file:
        for number, (start, end) in enumerate(_records(file)):
            entry = _entry(file, number, start, end)
            if entry is not None:
                yield entry


def image_of_parts(record: bytes) -> bytes:
    """The encoded image of a whole record in several parts, framing and padding included.

    Raises:
        ValueError: it is none.
    """
    parts, at = [], 0
    while True:
        if len(record) < at + _FRAME.size or record[at : at + 4] != _MAGIC:
            raise ValueError("its record is damaged")
        flag, length = _unpack(record[at : at + _FRAME.size])
        at += _FRAME.size
        if len(record) < at + length:
            raise ValueError("its record is damaged")
        parts.append(record[at : at + length])
        at += _padded(length)
        if flag in (_WHOLE, _LAST):
            break
    payload = _MAGIC.join(parts)
    if len(payload) < _HEADER.size:
        raise ValueError("its record is damaged")
    return payload[_image_at(payload) :]


def _records(file: ShardFile) -> Iterator[tuple[int, int]]:
    """Where records begin and end, padding included."""
    idx = idx_of(file.path)
    if idx is None:
        at = 0
        while at < file.size:
            end = _end(file, at)
            yield at, end
            at = end
        return
    starts = []
    for line in read_idx(idx):
        if len(line) != 2 or not line[1].isdecimal():
            raise DataError(f"{idx} is not an index of RecordIO: its lines are key and offset")
        starts.append(int(line[1]))
    if not starts:
        raise DataError(f"{idx} is empty: remove it, or write it anew with MXNet's rec2idx")
    for start in sorted(starts):
        if start >= file.size or file.at(start, 4) != _MAGIC:
            raise DataError(
                f"{idx} has a record at byte {start:,}, where {file.path} has none: the index is "
                "of another file, or the shard is cut off"
            )
        yield start, _end(file, start)


def _end(file: ShardFile, start: int) -> int:
    """Where the record ends that begins at ``start``."""
    at = start
    while True:
        frame = file.at(at, _FRAME.size)
        if len(frame) == _FRAME.size and frame[:4] != _MAGIC:
            raise DataError(
                f"{file.path} is damaged or not RecordIO: no record begins at byte {at:,}"
            )
        if len(frame) < _FRAME.size or at + _FRAME.size + (length := _unpack(frame)[1]) > file.size:
            raise DataError(f"{file.path} is cut off: the record at byte {start:,} goes on past it")
        flag = _unpack(frame)[0]
        if flag > _LAST or (flag in (_WHOLE, _FIRST)) != (at == start):
            raise DataError(
                f"{file.path} is damaged: the record at byte {start:,} has parts out of order"
            )
        at += _FRAME.size + _padded(length)
        if flag in (_WHOLE, _LAST):
            # Of the last record the padding may be missing.
            return min(at, file.size)


def _entry(file: ShardFile, number: int, start: int, end: int) -> Entry | None:
    """The image of a record; None where it holds none."""
    flag, length = _unpack(file.at(start, _FRAME.size))
    split = flag != _WHOLE
    payload_at = start + _FRAME.size
    if split:
        payload = _MAGIC.join(_parts(file, start))
    else:
        payload = file.at(payload_at, min(length, _HEADER.size + 4))
    name = f"record {number}"
    if len(payload) < _HEADER.size:
        raise DataError(f"{file.path}:{name} is too short to be an image of MXNet")
    labels, label, image_id, _ = _HEADER.unpack_from(payload)
    image_at = _image_at(payload)
    content_bytes = (len(payload) if split else length) - image_at
    if content_bytes < 0:
        raise DataError(f"{file.path}:{name} is too short for the {labels} labels it should have")
    if labels:
        if content_bytes == 0:
            return None
        (label,) = struct.unpack_from("<f", payload, _HEADER.size)
    name = f"{name}, id {image_id}"
    if not label.is_integer():
        raise DataError(f"{file.path}:{name} has label {label}: it must be the number of a class")
    if split:
        return Entry(name, int(label), start, end - start, split=True)
    return Entry(name, int(label), payload_at + image_at, content_bytes)


def _parts(file: ShardFile, start: int) -> Iterator[bytes]:
    at = start
    while True:
        flag, length = _unpack(file.at(at, _FRAME.size))
        yield file.at(at + _FRAME.size, length)
        at += _FRAME.size + _padded(length)
        if flag in (_WHOLE, _LAST):
            return


def _unpack(frame: bytes) -> tuple[int, int]:
    """Flag and length."""
    word = _FRAME.unpack(frame)[1]
    return word >> _LENGTH_BITS, word & ((1 << _LENGTH_BITS) - 1)


def _image_at(payload: bytes) -> int:
    labels: int = _HEADER.unpack_from(payload)[0]
    return _HEADER.size + 4 * labels


def _padded(length: int) -> int:
    return length + -length % 4
