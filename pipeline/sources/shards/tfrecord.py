"""The images of a TFRecord shard of ``tf.train.Example``.

A record is its length (uint64), a checksum of the length, a message and a checksum of the message,
all little-endian. Checksums are masked CRC-32C (TensorFlow,
``tensorflow/core/lib/io/record_writer.h`` and ``tensorflow/core/lib/hash/crc32c.h``). The messages
(``tensorflow/core/example/*.proto``) are parsed only as far as needed to find the images: the
encoded image is one byte range of its message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache

from ...errors import DataError
from .shard_file import Entry, ShardFile

_FRAME = struct.Struct("<QI")
_TAIL_BYTES = 4
_MASK_DELTA = 0xA282EAD8
_NEAR_BYTES = 4096
# Wire types of protocol buffers, and field numbers of Example, Features, Feature and its lists.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FEATURES = _FEATURE = _KEY = _VALUES = _BYTES_LIST = 1
_VALUE = 2
_INT64_LIST = 3
_IMAGE = b"image/encoded"
_LABEL = b"image/class/label"
_NAME = b"image/filename"
_CLASS = b"image/class/synset"

#: The start and end of a byte range in a shard.
_Range = tuple[int, int]


def scan(file: ShardFile, *, verify: bool = False, start: int = 0) -> Iterator[Entry]:
    """Yield the images of a shard in order.

    Their names are ``image/class/synset`` / ``image/filename``, as far as a record has these
    features, else the number of the record. DALI's index ``.idx`` (tfrecord2idx) is not needed.
    """
    for number, (at, end) in enumerate(_records(file, start)):
        where = f"{file.where}:record {number}"
        if verify and _masked(file.at(at, end - at)) != file.at(end, _TAIL_BYTES):
            raise DataError(f"{where} is damaged: its checksum does not match")
        try:
            yield _entry(file, number, at, end)
        except ValueError as error:
            raise DataError(f"{where} {error}") from error


def _records(file: ShardFile, after: int) -> Iterator[_Range]:
    """Yield the start and end of each message that starts after byte ``after``."""
    # The rest of a message is mostly short; the checksum of its length tells where one starts.
    near = range(after, min(after + _NEAR_BYTES, file.size)) if after else ()
    at = next((at for at in near if _masked(file.at(at, 8)) == file.at(at + 8, 4)), 0)
    if near and not at and near.stop == file.size:
        return
    while at < file.size:
        frame = file.at(at, _FRAME.size)
        if len(frame) == _FRAME.size and _masked(frame[:8]) != frame[8:]:
            raise DataError(
                f"{file.where} is damaged or not TFRecord (perhaps it is compressed): "
                f"no record starts at byte {at:,}"
            )
        start = at + _FRAME.size
        end = start + _FRAME.unpack(frame)[0] if len(frame) == _FRAME.size else file.size
        if end + _TAIL_BYTES > file.size:
            raise DataError(
                f"{file.where} is truncated: the record at byte {at:,} extends beyond its end"
            )
        if start > after:
            yield start, end
        at = end + _TAIL_BYTES


def _entry(file: ShardFile, number: int, start: int, end: int) -> Entry:
    found: dict[bytes, _Range] = {}
    for feature in _values(file, (start, end), _FEATURES, _FEATURE):
        fields = {field: (at, to) for field, at, to in _fields(file, *feature)}
        at, to = fields.get(_KEY, (0, 0))
        found[file.at(at, to - at)] = fields.get(_VALUE, (0, 0))
    image = _bytes(file, found, _IMAGE)
    label = _int64(file, found)
    names = [_text(file, found, key) for key in (_CLASS, _NAME)]
    name = "/".join(name for name in names if name) if names[1] else f"record {number}"
    if image is None or label is None:
        raise ValueError(f"has no {(_IMAGE if image is None else _LABEL).decode()}")
    return Entry(name, label, image[0], image[1] - image[0], class_name=names[0])


def _fields(file: ShardFile, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number, start and end of the value of each field of a message.

    The value of a varint field is the varint itself.
    """
    at = start
    while at < end:
        head = file.at(at, min(20, end - at))  # at most two varints
        tag, used = _varint(head, 0)
        wire_type = tag & 7
        length = {_FIXED64: 8, _FIXED32: 4}.get(wire_type, 0)
        if wire_type == _BYTES:
            length, used = _varint(head, used)
        elif wire_type == _VARINT:
            length = _varint(head, used)[1] - used
        elif not length:
            raise ValueError(f"is damaged: unknown wire type {wire_type}")
        at += used
        if at + length > end:
            raise ValueError("is damaged: a field extends beyond the end of its message")
        yield tag >> 3, at, at + length
        at += length


def _values(file: ShardFile, message: _Range, *path: int) -> Iterator[_Range]:
    """Yield the values of the fields of a message that a path of field numbers leads to."""
    for field, at, to in _fields(file, *message):
        if field == path[0]:
            yield from _values(file, (at, to), *path[1:]) if path[1:] else [(at, to)]


def _bytes(file: ShardFile, found: dict[bytes, _Range], key: bytes) -> _Range | None:
    """Return the only value of a feature of bytes; None if there is none."""
    values = list(_values(file, found.get(key, (0, 0)), _BYTES_LIST, _VALUES))
    if len(values) > 1:
        raise ValueError(f"has {len(values)} values of {key.decode()}; valid: one")
    return values[0] if values else None


def _text(file: ShardFile, found: dict[bytes, _Range], key: bytes) -> str | None:
    value = _bytes(file, found, key)
    return value and file.at(value[0], value[1] - value[0]).decode(errors="replace")


def _int64(file: ShardFile, found: dict[bytes, _Range]) -> int | None:
    """Return the only label, a varint that may be packed; None if there is none."""
    values = _values(file, found.get(_LABEL, (0, 0)), _INT64_LIST, _VALUES)
    content = b"".join(file.at(at, to - at) for at, to in values)
    if not content:
        return None
    label, used = _varint(content, 0)
    if used != len(content):
        raise ValueError(f"has several values of {_LABEL.decode()}; valid: one")
    return label - (1 << 64) if label >> 63 else label


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the number at ``at`` and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            break
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError("is damaged: a number does not end")


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
    """Compute CRC-32C bit by bit, which is enough for lengths."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
