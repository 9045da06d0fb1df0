"""TFRecord shards of ``tf.train.Example``, with the index of DALI's ``tfrecord2idx``.

A record is its length (uint64), a checksum of that, the message, and a checksum of the message;
checksums are masked CRC-32C. https://www.tensorflow.org/tutorials/load_data/tfrecord

The keys are those of TensorFlow's own ImageNet shards: ``image/encoded``, ``image/filename``,
``image/class/synset`` (the name of the class) and ``image/class/label``. Here that label counts
from 0, as everywhere in this library; in TensorFlow's shards it counts from 1.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ...errors import DataError
from .base import Entry, Placed, Record

_VARINT, _BYTES = 0, 2  # wire types of protocol buffers
_MASK_DELTA = 0xA282EAD8


class TFRecord:
    """TFRecord shards."""

    suffix = ".tfrecord"

    def __init__(self) -> None:
        try:
            import google_crc32c
        except ImportError as error:
            raise DataError(
                "google-crc32c is not installed: pip install 'largebatch[recipes]'"
            ) from error
        self._crc32c = google_crc32c.value

    def name(self, name: str) -> str:
        """As it is."""
        return name

    def key(self, name: str) -> str:
        """The name."""
        return name

    def record(self, entry: Entry) -> Record:
        """The message, its features in the order of their keys, framed."""
        label = _int64_feature("image/class/label", entry.label)
        synset = _bytes_feature("image/class/synset", entry.class_name.encode())
        filename = _bytes_feature("image/filename", entry.name.rpartition("/")[2].encode())
        encoded = _bytes_feature("image/encoded", entry.content)
        opening = encoded[: -len(entry.content)] if entry.content else encoded
        features = len(label) + len(synset) + len(encoded) + len(filename)
        head = _tag(1, _BYTES) + _varint(features) + label + synset + opening
        size = len(head) + len(entry.content) + len(filename)
        length = struct.pack("<Q", size)
        message_crc = self._masked(head + entry.content + filename)
        return Record(
            before=length + self._masked(length) + head,
            image=entry.content,
            after=filename + message_crc,
        )

    def closing(self, size: int) -> bytes:
        """Nothing."""
        return b""

    def idx(self, records: Sequence[Placed]) -> str:
        """Where each record begins, and its length with the framing."""
        return "".join(f"{placed.start} {placed.size}\n" for placed in records)

    def _masked(self, content: bytes) -> bytes:
        crc = self._crc32c(content)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _field(number: int, content: bytes) -> bytes:
    return _tag(number, _BYTES) + _varint(len(content)) + content


def _feature(key: str, feature: bytes) -> bytes:
    """An entry of the map ``Features.feature``; the value comes last in it."""
    return _field(1, _field(1, key.encode()) + _field(2, feature))


def _bytes_feature(key: str, value: bytes) -> bytes:
    return _feature(key, _field(1, _field(1, value)))  # Feature.bytes_list.value


def _int64_feature(key: str, value: int) -> bytes:
    return _feature(key, _field(3, _field(1, _varint(value))))  # Feature.int64_list, packed
