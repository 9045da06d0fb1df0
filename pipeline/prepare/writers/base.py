"""What every format of shards says: how an image is put into one, and its index files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Entry:
    """An image on its way into a shard.

    Attributes:
        number: its place among all images of the split.
        name: ``class/file``.
        label: the number of its class, from 0.
        class_name: the name of its class.
        content: the encoded image.
    """

    number: int
    name: str
    label: int
    class_name: str
    content: bytes


@dataclass(frozen=True)
class Record:
    """An image as it lies in a shard.

    Attributes:
        before: bytes before the image.
        image: the encoded image.
        after: bytes after it, up to the next record.
    """

    before: bytes
    image: bytes
    after: bytes

    def __len__(self) -> int:
        return len(self.before) + len(self.image) + len(self.after)


@dataclass(frozen=True)
class Placed:
    """Where a record came to lie: it begins at ``start`` and takes ``size`` bytes, of which the
    image is the ``length`` from ``offset`` on; all from the beginning of the shard."""

    name: str
    label: int
    start: int
    size: int
    offset: int
    length: int


class ShardFormat(Protocol):
    """A format of shards.

    Attributes:
        suffix: of its files, with the dot. Beside each lies a text file ``.idx`` for other tools.
    """

    suffix: str

    def name(self, name: str) -> str:
        """The name ``class/file`` of an image as the format can hold it."""
        ...

    def key(self, name: str) -> str:
        """What must differ between any two images of a split."""
        ...

    def record(self, entry: Entry) -> Record: ...

    def closing(self, size: int) -> bytes:
        """What ends a shard of so many bytes."""
        ...

    def idx(self, records: Sequence[Placed]) -> str:
        """The index file of a shard."""
        ...
