"""Reading of a local shard, and the entries found in it: shared by all shard formats."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ...errors import DataError

_WINDOW_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """An image found in a shard.

    Attributes:
        name: Name of the image, as stored in the shard if the format has names.
        label: Class number, as stored in the shard.
        offset: Offset of the encoded image in bytes.
        length: Size of the encoded image in bytes.
        split: Whether ``offset`` and ``length`` are of an MXNet record in several parts.
        class_name: Name of the class, if stored in the shard.
    """

    name: str
    label: int
    offset: int
    length: int
    split: bool = False
    class_name: str | None = None


class ShardFile:
    """Reads small byte ranges of a shard through a window.

    Args:
        path: Path of the shard, a local file.

    Raises:
        DataError: The shard cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        self.size = os.fstat(self._file).st_size
        self._window = b""
        self._window_at = 0

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def at(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes at ``offset``; fewer at the end of the file.

        Raises:
            DataError: The bytes cannot be read.
        """
        start = offset - self._window_at
        if start < 0 or start + length > len(self._window):
            self._window = self._read(offset, max(length, _WINDOW_BYTES))
            self._window_at = offset
            start = 0
        return self._window[start : start + length]

    def _read(self, offset: int, length: int) -> bytes:
        pieces = []
        try:
            while length and (piece := os.pread(self._file, length, offset)):
                pieces.append(piece)
                offset += len(piece)
                length -= len(piece)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        return b"".join(pieces)


def idx_of(path: Path) -> Path | None:
    """Return the index file of a shard, ``x.idx`` or ``x.tar.idx`` for ``x.tar``, if it exists."""
    for idx in (path.with_suffix(".idx"), path.with_name(f"{path.name}.idx")):
        if idx.is_file():
            return idx
    return None


def read_idx(idx: Path) -> list[list[str]]:
    """Return the words of each line of an index file.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        return [line.split() for line in idx.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise DataError(f"{idx} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{idx} is not a text file") from error
