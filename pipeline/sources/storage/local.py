"""The interface of storage, and the storage of a local folder."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ...errors import DataError
from ..base import Encoded

_OPEN_FILES = 64
#: Most bytes of an image. The largest of ImageNet has 15 MB.
MOST_IMAGE_BYTES = 2**28


class ByteRange(NamedTuple):
    """A byte range of a file."""

    file: str
    offset: int
    length: int


class Storage(Protocol):
    """A local or remote folder; files are named by their relative path with slashes."""

    def where(self, file: str) -> str:
        """Return the path or URL of a file, for messages."""
        ...

    def sizes(self, files: Sequence[str]) -> list[int | None]:
        """Return the sizes of files in bytes; None for missing files.

        Raises:
            DataError: The storage cannot be read.
        """
        ...

    def content(self, file: str) -> bytes | None:
        """Read a whole file; None if it is missing.

        Raises:
            DataError: The storage cannot be read.
        """
        ...

    def read(self, ranges: Sequence[ByteRange]) -> list[Encoded | str]:
        """Read byte ranges; for each its bytes, or the text of an error that concerns it alone.

        Raises:
            DataError: The storage cannot be read.
        """
        ...


def open_regular(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Open a regular file for reading; return its descriptor and its size in bytes.

    Raises:
        OSError: The file cannot be opened, or is a device, a FIFO or a folder, which reading could
            wait for or never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor, status.st_size


class LocalStorage:
    """The files of a local folder, a few of which each reading thread keeps open.

    It survives a fork, since no file position is shared.

    Args:
        folder: The folder of the files.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        # Per thread, so that no thread closes a file that another one reads.
        self._open: dict[int, OrderedDict[str, int]] = {}

    def __del__(self) -> None:
        for files in self._open.values():
            for descriptor in files.values():
                os.close(descriptor)

    def where(self, file: str) -> str:
        """Return the path of a file."""
        return str(self._folder / file)

    def sizes(self, files: Sequence[str]) -> list[int | None]:
        """Return the sizes of files in bytes; None for missing files."""
        return [self._size(file) for file in files]

    def content(self, file: str) -> bytes | None:
        """Read a whole file; None if it is missing."""
        try:
            return (self._folder / file).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{self.where(file)} cannot be read: {error.strerror}") from error

    def read(self, ranges: Sequence[ByteRange]) -> list[Encoded | str]:
        """Read byte ranges; for each its bytes, or the text of its error."""
        found: list[Encoded | str] = [""] * len(ranges)
        # Sorted by file, so that each file is opened at most once per call.
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
            return f"cannot be read: the shard is {wanted.length - done:,} bytes too short"
        return content

    def _descriptor(self, file: str) -> int:
        files = self._open.setdefault(threading.get_ident(), OrderedDict())
        descriptor = files.pop(file, None)
        if descriptor is None:
            descriptor = open_regular(self._folder / file)[0]
            if len(files) >= _OPEN_FILES:
                os.close(files.popitem(last=False)[1])
        files[file] = descriptor
        return descriptor


def read_range(file: int, offset: int, size: int, path: Path) -> bytes:
    """Read ``size`` bytes of an open file, starting at ``offset``.

    Raises:
        DataError: The bytes cannot be read.
    """
    parts = []
    while size > 0:
        try:
            part = os.pread(file, size, offset)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        if not part:
            raise DataError(f"{path} is truncated: it ends before byte {offset + size:,}")
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
