"""TFRecord shards of ``tf.train.Example``, with the index of DALI's ``tfrecord2idx``.

A record is its length (uint64), a checksum of the length, the message, and a checksum of the
message. Checksums are masked CRC-32C. https://www.tensorflow.org/tutorials/load_data/tfrecord

The keys are those of TensorFlow's own ImageNet shards: ``image/encoded``, ``image/filename``,
``image/class/synset`` (the name of the class) and ``image/class/label``. Here labels start
from 0, as everywhere in this library; in TensorFlow's shards they start from 1.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ...errors import DataError
from .base import PlacedRecord, Record, Sample

_VARINT, _BYTES = 0, 2  # wire types of protocol buffers
_MASK_DELTA = 0xA282EAD8


class TFRecord:
    """TFRecord shards of ``tf.train.Example``."""

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
        """Return the name unchanged."""
        return name

    def key(self, name: str) -> str:
        """Return the whole name."""
        return name

    def record(self, sample: Sample) -> Record:
        """Return the framed message, with its features in the order of their keys."""
        label = _int64_feature("image/class/label", sample.label)
        synset = _bytes_feature("image/class/synset", sample.class_name.encode())
        filename = _bytes_feature("image/filename", sample.name.rpartition("/")[2].encode())
        encoded = _bytes_feature("image/encoded", sample.content)
        opening = encoded[: -len(sample.content)] if sample.content else encoded
        features = len(label) + len(synset) + len(encoded) + len(filename)
        head = _tag(1, _BYTES) + _varint(features) + label + synset + opening
        size = len(head) + len(sample.content) + len(filename)
        length = struct.pack("<Q", size)
        message_crc = self._masked(head + sample.content + filename)
        return Record(
            before=length + self._masked(length) + head,
            image=sample.content,
            after=filename + message_crc,
        )

    def footer(self, size: int) -> bytes:
        """Return nothing: the format has no footer."""
        return b""

    def idx(self, records: Sequence[PlacedRecord]) -> str:
        """Return the offset of each record and its size with the framing."""
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
    """Encode an entry of the map ``Features.feature``, in which the value comes last."""
    return _field(1, _field(1, key.encode()) + _field(2, feature))


def _bytes_feature(key: str, value: bytes) -> bytes:
    return _feature(key, _field(1, _field(1, value)))  # Feature.bytes_list.value


def _int64_feature(key: str, value: int) -> bytes:
    return _feature(key, _field(3, _field(1, _varint(value))))  # Feature.int64_list, packed
