"""TFRecord shards of ``tf.train.Example``: where the images are in them.

A record is its length (uint64), a checksum of that, a message and a checksum of the message, all
little-endian; checksums are CRC-32C, masked (TensorFlow, ``tensorflow/core/lib/io/record_writer.h``
and ``tensorflow/core/lib/hash/crc32c.h``). Of the message (``tensorflow/core/example/*.proto``)
only as much is read as finds the images: the encoded image is one run of bytes in it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from ...errors import DataError
from .shard_file import Entry, ShardFile, idx_of, read_idx

_FRAME = struct.Struct("<QI")
_TAIL_BYTES = 4
_MASK_DELTA = 0xA282EAD8
# Of protocol buffers: wire types, and the fields of Example, Features, Feature and its lists.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FEATURES = _FEATURE = _KEY = _VALUES = _BYTES_LIST = 1
_VALUE = 2
_INT64_LIST = 3

_IMAGE = b"image/encoded"
_LABEL = b"image/class/label"
_NAME = b"image/filename"
_CLASS = b"image/class/synset"
_WANTED = frozenset({_IMAGE, _LABEL, _NAME, _CLASS})

#: A run of bytes in a shard: where it begins and ends.
_Run = tuple[int, int]


def scan(path: Path, *, verify: bool = False) -> Iterator[Entry]:
    """The images of a shard, in order.

    They are called ``image/class/synset`` / ``image/filename``, as far as a record has these, and
    else by their number.

    Args:
        path: of the shard. An index ``.idx`` beside it (DALI's tfrecord2idx) must fit it.
        verify: read every record whole and check its checksum.

    Raises:
        DataError: it is not TFRecord, it is cut off, a checksum is wrong, its index is of another
            shard, or a record has no image or no label.
    """
    with ShardFile(path) as file:
        expected = _read_idx(path)
        count = 0
        for number, (start, end) in enumerate(_records(file)):
            count += 1
            at, size = start - _FRAME.size, _FRAME.size + end - start + _TAIL_BYTES
            if expected is not None and expected[number : number + 1] != [(at, size)]:
                raise _other_idx(path)
            if verify:
                message, checksum = file.at(start, end - start), file.at(end, _TAIL_BYTES)
                if _masked(message) != checksum:
                    raise DataError(
                        f"{path}:record {number} is damaged: its checksum is not that of its bytes"
                    )
            try:
                yield _entry(file, number, start, end)
            except ValueError as error:
                raise DataError(f"{path}:record {number} {error}") from error
        if expected is not None and len(expected) != count:
            raise _other_idx(path)


def _records(file: ShardFile) -> Iterator[_Run]:
    """Where messages begin and end."""
    at = 0
    while at < file.size:
        frame = file.at(at, _FRAME.size)
        if len(frame) == _FRAME.size and _masked(frame[:8]) != frame[8:]:
            raise DataError(
                f"{file.path} is damaged or not TFRecord (perhaps it is compressed): "
                f"no record begins at byte {at:,}"
            )
        start = at + _FRAME.size
        end = start + _FRAME.unpack(frame)[0] if len(frame) == _FRAME.size else file.size
        if end + _TAIL_BYTES > file.size:
            raise DataError(f"{file.path} is cut off: the record at byte {at:,} goes on past it")
        yield start, end
        at = end + _TAIL_BYTES


def _entry(file: ShardFile, number: int, start: int, end: int) -> Entry:
    found: dict[bytes, _Run] = {}
    for field, features, features_end in _fields(file, start, end):
        if field != _FEATURES:
            continue
        for field, feature, feature_end in _fields(file, features, features_end):
            if field == _FEATURE:
                key, value = _map_entry(file, feature, feature_end)
                if key in _WANTED:
                    found[key] = value
    image = _bytes(file, found, _IMAGE)
    label = _int64(file, found)
    names = [_text(file, found, key) for key in (_CLASS, _NAME)]
    name = "/".join(name for name in names if name) if names[1] else f"record {number}"
    if image is None or label is None:
        raise ValueError(f"has no {(_IMAGE if image is None else _LABEL).decode()}")
    return Entry(name, label, image[0], image[1] - image[0], class_name=names[0])


def _fields(file: ShardFile, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields of a message that hold bytes or messages: number, and where they begin and end.

    Of varints, the place of the varint itself.
    """
    at = start
    while at < end:
        head = file.at(at, min(20, end - at))  # two varints at most
        tag, used = _varint(head, 0)
        wire_type = tag & 7
        length = {_FIXED64: 8, _FIXED32: 4}.get(wire_type, 0)
        if wire_type == _BYTES:
            length, used = _varint(head, used)
        elif wire_type == _VARINT:
            length = _varint(head, used)[1] - used
        elif not length:
            raise ValueError(f"is damaged: there is no wire type {wire_type}")
        at += used
        if at + length > end:
            raise ValueError("is damaged: a field goes on past its message")
        yield tag >> 3, at, at + length
        at += length


def _map_entry(file: ShardFile, start: int, end: int) -> tuple[bytes, _Run]:
    """Key and value of a feature."""
    key, value = b"", (start, start)
    for field, at, to in _fields(file, start, end):
        if field == _KEY:
            key = file.at(at, to - at)
        elif field == _VALUE:
            value = (at, to)
    return key, value


def _bytes(file: ShardFile, found: dict[bytes, _Run], key: bytes) -> _Run | None:
    """The one value of a feature of bytes."""
    values = [
        (at, to)
        for field, list_at, list_to in _fields(file, *found.get(key, (0, 0)))
        if field == _BYTES_LIST
        for field, at, to in _fields(file, list_at, list_to)
        if field == _VALUES
    ]
    if len(values) > 1:
        raise ValueError(f"has {len(values)} values of {key.decode()}, not one")
    return values[0] if values else None


def _text(file: ShardFile, found: dict[bytes, _Run], key: bytes) -> str | None:
    value = _bytes(file, found, key)
    if value is None:
        return None
    return file.at(value[0], value[1] - value[0]).decode(errors="replace")


def _int64(file: ShardFile, found: dict[bytes, _Run]) -> int | None:
    """The one label; packed or not, it is a varint in its field."""
    values = [
        file.at(at, to - at)
        for field, list_at, list_to in _fields(file, *found.get(_LABEL, (0, 0)))
        if field == _INT64_LIST
        for field, at, to in _fields(file, list_at, list_to)
        if field == _VALUES
    ]
    content = b"".join(values)
    if not content:
        return None
    label, used = _varint(content, 0)
    if used != len(content):
        raise ValueError(f"has several values of {_LABEL.decode()}, not one")
    return label - (1 << 64) if label >> 63 else label


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            break
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError("is damaged: a number in it does not end")


def _read_idx(path: Path) -> list[_Run] | None:
    """Offsets and sizes of the records as the index has them."""
    idx = idx_of(path)
    if idx is None:
        return None
    lines = read_idx(idx)
    if not all(len(line) == 2 and line[0].isdecimal() and line[1].isdecimal() for line in lines):
        raise DataError(f"{idx} is not an index of TFRecord: its lines are offset and size")
    return [(int(offset), int(size)) for offset, size in lines]


def _other_idx(path: Path) -> DataError:
    return DataError(
        f"{idx_of(path)} does not fit {path}: remove it, or write it anew with DALI's tfrecord2idx"
    )


def _masked(content: bytes) -> bytes:
    crc = _crc32c()(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


@cache
def _crc32c() -> Callable[[bytes], int]:
    try:
        import google_crc32c
    except ImportError:
        return _slow_crc32c
    value: Callable[[bytes], int] = google_crc32c.value
    return value


def _slow_crc32c(content: bytes) -> int:
    """CRC-32C byte by byte: a few megabytes a second, and enough for lengths."""
    table = _crc32c_table()
    crc = 0xFFFFFFFF
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _crc32c_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)
