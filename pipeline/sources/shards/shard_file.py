"""Reading of a shard, local or on a server, and the entries found in it."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import DataError
from ..storage.local import ByteRange, Storage

_WINDOW_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """An image found in a shard, with the name and label that are stored there."""

    name: str
    label: int
    offset: int  # of the encoded image, in bytes
    length: int  # in bytes
    split: bool = False  # whether these are of an MXNet record in several parts
    class_name: str | None = None  # if it is stored


class ShardFile:
    """Reads byte ranges of a shard through a window; a DataError says that it cannot be read."""

    def __init__(self, storage: Storage, name: str, size: int | None = None) -> None:
        self.storage, self.name, self.where = storage, name, storage.where(name)
        if size is None:
            (size,) = storage.sizes([name])
        if size is None:
            raise DataError(f"{self.where} cannot be read: No such file or directory")
        self.size = size
        self._window = b""
        self._window_at = 0
        self._position = 0

    def at(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes at ``offset``; fewer at the end of the shard."""
        start = offset - self._window_at
        if start < 0 or start + length > len(self._window):
            there = min(max(length, _WINDOW_BYTES), self.size - offset)
            if there <= 0:
                return b""
            (content,) = self.storage.read([ByteRange(self.name, offset, there)])
            if isinstance(content, str):
                raise DataError(f"{self.where} {content}")
            self._window, self._window_at, start = content.tobytes(), offset, 0
        return self._window[start : start + length]

    # What tarfile needs of a file object:

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, length: int) -> bytes:
        content = self.at(self._position, length)
        self._position += len(content)
        return content
