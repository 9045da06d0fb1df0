"""The interface of a shard format: how it stores an image, and its index files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sample:
    """An image to be written to a shard.

    Attributes:
        name: Name of the image, ``class/file``.
        label: Class number, from 0.
        class_name: Name of the class.
        content: The encoded image.
    """

    name: str
    label: int
    class_name: str
    content: bytes


@dataclass(frozen=True)
class Record:
    """The bytes of an image in a shard.

    Attributes:
        before: Bytes of the record before the image.
        image: The encoded image.
        after: Bytes of the record after the image.
    """

    before: bytes
    image: bytes
    after: bytes

    def __len__(self) -> int:
        return len(self.before) + len(self.image) + len(self.after)


@dataclass(frozen=True)
class PlacedRecord:
    """A record that has been written to a shard.

    Attributes:
        name: Name of the image.
        label: Class number, from 0.
        start: Offset of the record in the shard, in bytes.
        size: Size of the record in bytes.
        offset: Offset of the encoded image in the shard, in bytes.
        length: Size of the encoded image in bytes.
    """

    name: str
    label: int
    start: int
    size: int
    offset: int
    length: int


class ShardFormat(Protocol):
    """A format of shards.

    Each shard has a text file ``.idx`` beside it, for other tools.

    Attributes:
        suffix: Suffix of the files, with the dot.
    """

    suffix: str

    def name(self, name: str) -> str:
        """Convert the name ``class/file`` of an image to one that the format can hold."""
        ...

    def key(self, name: str) -> str:
        """Return the part of a name that must be unique among the images of a split."""
        ...

    def record(self, sample: Sample) -> Record:
        """Return the bytes of an image and its label."""
        ...

    def footer(self, size: int) -> bytes:
        """Return the bytes that end a shard of ``size`` bytes."""
        ...

    def idx(self, records: Sequence[PlacedRecord]) -> str:
        """Return the text of a shard's index file."""
        ...
