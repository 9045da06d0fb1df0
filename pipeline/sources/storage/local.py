"""Where shards lie, and how runs of their bytes are read: the files of a local folder."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ...errors import DataError
from ..base import Encoded

_OPEN_FILES = 64


class ByteRange(NamedTuple):
    """A run of bytes in a file of a storage."""

    file: str
    offset: int
    length: int


class Storage(Protocol):
    """A folder of files, here or elsewhere; files are named relative to it, with slashes."""

    def where(self, file: str) -> str:
        """Its path or URL, for messages."""
        ...

    def sizes(self, files: Sequence[str]) -> list[int | None]:
        """In bytes; None for those that are not there.

        Raises:
            DataError: the storage cannot be read.
        """
        ...

    def content(self, file: str) -> bytes | None:
        """Of a whole file; None if it is not there.

        Raises:
            DataError: the storage cannot be read.
        """
        ...

    def read(self, ranges: Sequence[ByteRange]) -> list[Encoded | str]:
        """The bytes of each, or what is wrong with it alone.

        Raises:
            DataError: the storage cannot be read.
        """
        ...


class LocalStorage:
    """The files of a local folder. Each thread that reads keeps a few of them open.

    It may be forked: places in files are not shared.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        # By thread: none closes a file that another reads.
        self._open: dict[int, OrderedDict[str, int]] = {}

    def __del__(self) -> None:
        for files in self._open.values():
            for descriptor in files.values():
                os.close(descriptor)

    def where(self, file: str) -> str:
        """Its path."""
        return str(self._folder / file)

    def sizes(self, files: Sequence[str]) -> list[int | None]:
        """In bytes; None for those that are not there."""
        return [self._size(file) for file in files]

    def content(self, file: str) -> bytes | None:
        """Of a whole file; None if it is not there."""
        try:
            return (self._folder / file).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{self.where(file)} cannot be read: {error.strerror}") from error

    def read(self, ranges: Sequence[ByteRange]) -> list[Encoded | str]:
        """The bytes of each, or what is wrong with it."""
        found: list[Encoded | str] = [""] * len(ranges)
        # File by file, so that each is opened once a call at most.
        for number in sorted(range(len(ranges)), key=ranges.__getitem__):
            found[number] = self._read(ranges[number])
        return found

    def _size(self, file: str) -> int | None:
        try:
            return (self._folder / file).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DataError(f"{self.where(file)} cannot be read: {error.strerror}") from error

    def _read(self, wanted: ByteRange) -> Encoded | str:
        content = np.empty(wanted.length, dtype=np.uint8)
        done = 0
        try:
            descriptor = self._descriptor(wanted.file)
            while done < wanted.length and (
                count := os.preadv(descriptor, [content.data[done:]], wanted.offset + done)
            ):
                done += count
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if done < wanted.length:
            return f"cannot be read: the shard ends {wanted.length - done:,} bytes too early"
        return content

    def _descriptor(self, file: str) -> int:
        files = self._open.setdefault(threading.get_ident(), OrderedDict())
        descriptor = files.pop(file, None)
        if descriptor is None:
            descriptor = os.open(self._folder / file, os.O_RDONLY)
            if len(files) >= _OPEN_FILES:
                os.close(files.popitem(last=False)[1])
        files[file] = descriptor
        return descriptor


def read_run(file: int, offset: int, size: int, path: Path) -> bytes:
    """``size`` bytes of an open file from ``offset`` on.

    Raises:
        DataError: they cannot be read.
    """
    parts = []
    while size > 0:
        try:
            part = os.pread(file, size, offset)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        if not part:
            raise DataError(f"{path} ends before byte {offset + size:,}: it was cut short")
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
