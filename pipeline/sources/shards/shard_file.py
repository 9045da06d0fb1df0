"""What the scanners of all formats of shards share: reading one, and the images found in it."""

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
        name: of the image; the shard's own where the format has names.
        label: the number of its class as the shard has it.
        offset: of the encoded image, in bytes.
        length: of the encoded image, in bytes.
        split: ``offset`` and ``length`` are of a whole MXNet record in several parts.
        class_name: the name of its class, where the shard tells it.
    """

    name: str
    label: int
    offset: int
    length: int
    split: bool = False
    class_name: str | None = None


class ShardFile:
    """Reads a few bytes here and there in a shard.

    Args:
        path: of the shard, a local file.

    Raises:
        DataError: it cannot be read.
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
        """Some bytes; fewer at the end of the file.

        Raises:
            DataError: they cannot be read.
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
    """The text file ``.idx`` beside a shard: ``x.idx`` or ``x.tar.idx`` for ``x.tar``."""
    for idx in (path.with_suffix(".idx"), path.with_name(f"{path.name}.idx")):
        if idx.is_file():
            return idx
    return None


def read_idx(idx: Path) -> list[list[str]]:
    """The words of its lines.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return [line.split() for line in idx.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise DataError(f"{idx} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{idx} is not a text file") from error
