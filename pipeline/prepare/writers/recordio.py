"""MXNet RecordIO shards, with the index of MXNet's ``IndexedRecordIO``.

A record is a magic number, a word of three flag bits and the length, and the payload, padded to
four bytes. A payload that holds the magic number at a multiple of four bytes is cut there into
several parts, each a record of its own, and the magic number left out (``dmlc/recordio.h``). The
payload is MXNet's ``IRHeader`` (flag, label, two ids) and the encoded image.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from ...errors import DataError
from .base import Entry, Placed, Record

_MAGIC = struct.pack("<I", 0xCED7230A)
_HEADER = struct.Struct("<IfQQ")  # flag 0: the label is the float that follows
_MAX_BYTES = 1 << 29  # lengths have 29 bits
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)


class RecordIO:
    """MXNet RecordIO shards."""

    suffix = ".rec"

    def name(self, name: str) -> str:
        """As it is; the shards themselves do not hold it."""
        return name

    def key(self, name: str) -> str:
        """The name."""
        return name

    def record(self, entry: Entry) -> Record:
        """The image with its header; the id is the image's number in the split."""
        header = _HEADER.pack(0, float(entry.label), entry.number, 0)
        payload = header + entry.content
        if len(payload) >= _MAX_BYTES:
            raise DataError(f"{entry.name} has {len(entry.content):,} bytes: too long for RecordIO")
        parts = list(_parts(payload))
        padding = bytes(-len(payload) % 4)
        if len(parts) == 1:
            return Record(_lead(_WHOLE, len(payload)) + header, entry.content, padding)
        flags = [_FIRST, *[_MIDDLE] * (len(parts) - 2), _LAST]
        whole = b"".join(
            _lead(flag, len(part)) + part for flag, part in zip(flags, parts, strict=True)
        )
        return Record(b"", whole + padding, b"", split=True)

    def closing(self, size: int) -> bytes:
        """Nothing."""
        return b""

    def idx(self, records: Sequence[Placed]) -> str:
        """A key, which is the number in the shard, and where each record begins."""
        return "".join(f"{key}\t{placed.start}\n" for key, placed in enumerate(records))


def _lead(flag: int, length: int) -> bytes:
    return _MAGIC + struct.pack("<I", flag << 29 | length)


def _parts(payload: bytes) -> Iterator[bytes]:
    """What is between magic numbers at multiples of four bytes."""
    start = at = 0
    while (at := payload.find(_MAGIC, at)) >= 0:
        if at % 4:
            at += 1
            continue
        yield payload[start:at]
        start = at = at + len(_MAGIC)
    yield payload[start:]
