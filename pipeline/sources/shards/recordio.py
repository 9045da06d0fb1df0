"""The images of an MXNet RecordIO shard (a ``.rec`` file).

A record is a magic number, a word of three flag bits and 29 bits of length, and the payload,
padded to four bytes. A payload that contains the magic number at a multiple of four bytes is split
there into several parts, each framed in this way, and the magic number is left out (dmlc-core,
``src/recordio.cc``). The payload is MXNet's ``IRHeader`` (flag, label, two ids), a number of float
labels given by the flag, and the encoded image (MXNet, ``python/mxnet/recordio.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from ...errors import DataError
from .shard_file import Entry, ShardFile

_MAGIC = struct.pack("<I", 0xCED7230A)
_FRAME_BYTES = 8
_HEADER = struct.Struct("<IfQQ")
_LENGTH_BITS = 29
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_Range = tuple[int, int]


def scan(file: ShardFile, *, verify: bool = False, start: int = 0) -> Iterator[Entry]:
    """Yield the images of a shard in the order of their offsets, which is also DALI's.

    Records with labels but no image are skipped; face data sets keep metadata in them. Of several
    labels the first is the class. There are no checksums to ``verify``. MXNet's index ``.idx`` is
    not needed.
    """
    for number, (at, parts) in enumerate(_records(file, _padded(start))):
        entry = _entry(file, number, at, parts)
        if entry is not None:
            yield entry


def image_of_parts(record: bytes) -> bytes:
    """Return the image of a record in several parts with framing; ValueError if it is damaged."""
    parts = _parts(lambda at, length: record[at : at + length], len(record), 0)
    payload = _MAGIC.join(record[begin:end] for begin, end in parts)
    if len(payload) < _HEADER.size:
        raise ValueError("is too short for an image of MXNet")
    return payload[_image_at(payload) :]


def _records(file: ShardFile, at: int) -> Iterator[tuple[int, list[_Range]]]:
    """Yield the start and the parts of each record from byte ``at`` on."""
    while at < file.size:
        yield at, (parts := _record(file, at))
        at = _end(parts)


def _record(file: ShardFile, start: int) -> list[_Range]:
    try:
        return list(_parts(file.at, file.size, start))
    except ValueError as error:
        raise DataError(f"{file.where} {error}") from error


def _parts(read: Callable[[int, int], bytes], size: int, start: int) -> Iterator[_Range]:
    """Yield begin and end of each part of the payload of the record that starts at ``start``."""
    at = start
    while True:
        frame = read(at, _FRAME_BYTES)
        if len(frame) == _FRAME_BYTES and frame[:4] != _MAGIC:
            raise ValueError(f"is damaged or not RecordIO: no record starts at byte {at:,}")
        word = int.from_bytes(frame[4:], "little")
        flag, length = word >> _LENGTH_BITS, word & ((1 << _LENGTH_BITS) - 1)
        begin = at + _FRAME_BYTES
        if len(frame) < _FRAME_BYTES or begin + length > size:
            raise ValueError(f"is truncated: the record at byte {start:,} extends beyond its end")
        if flag > _LAST or (flag in (_WHOLE, _FIRST)) != (at == start):
            raise ValueError(f"is damaged: the record at byte {start:,} has parts out of order")
        yield begin, begin + length
        if flag in (_WHOLE, _LAST):
            return
        at = begin + _padded(length)


def _end(parts: list[_Range]) -> int:
    """Return the end of a record, padding included, which may be missing in the last one."""
    begin, end = parts[-1]
    return begin + _padded(end - begin)


def _entry(file: ShardFile, number: int, start: int, parts: list[_Range]) -> Entry | None:
    """Return the image of a record; None if the record holds no image."""
    begin, end = parts[0]
    split = len(parts) > 1
    if split:
        payload = _MAGIC.join(file.at(at, to - at) for at, to in parts)
    else:
        payload = file.at(begin, min(end - begin, _HEADER.size + 4))
    name = f"record {number}"
    if len(payload) < _HEADER.size:
        raise DataError(f"{file.where}:{name} is too short for an image of MXNet")
    labels, label, image_id, _ = _HEADER.unpack_from(payload)
    image_at = _image_at(payload)
    content_bytes = (len(payload) if split else end - begin) - image_at
    if content_bytes < 0:
        raise DataError(f"{file.where}:{name} is too short for its {labels} labels")
    if labels:
        if content_bytes == 0:
            return None
        (label,) = struct.unpack_from("<f", payload, _HEADER.size)
    name = f"{name}, id {image_id}"
    if not label.is_integer():
        raise DataError(f"{file.where}:{name} has label {label}; valid: a class number")
    if split:
        return Entry(name, int(label), start, min(_end(parts), file.size) - start, split=True)
    return Entry(name, int(label), begin + image_at, content_bytes)


def _image_at(payload: bytes) -> int:
    labels: int = _HEADER.unpack_from(payload)[0]
    return _HEADER.size + 4 * labels


def _padded(length: int) -> int:
    return length + -length % 4
