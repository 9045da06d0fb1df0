"""The interface of storage, and the storage of a local folder."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np

from ...errors import DataError
from ..base import Encoded

#: Most bytes of an image. The largest of ImageNet has 15 MB.
MOST_IMAGE_BYTES = 2**28
#: Most bytes of an index as it is stored.
MOST_INDEX_BYTES = 2**29
_ATTEMPTS = 2


class ByteRange(NamedTuple):
    """A byte range of a file."""

    file: str
    offset: int
    length: int


class Storage(Protocol):
    """A local or remote folder; files are named by their relative path with slashes.

    All methods but ``where`` raise :class:`DataError` if the storage cannot be read.
    """

    def where(self, file: str) -> str:
        """Return the path or URL of a file, for messages; it holds no secrets."""

    def sizes(self, files: Sequence[str]) -> list[int | None]:
        """Return the sizes of files in bytes; None for missing files."""

    def content(self, file: str) -> bytes | None:
        """Read a whole file of at most :data:`MOST_INDEX_BYTES`; None if it is missing."""

    def read(self, ranges: Sequence[ByteRange]) -> list[Encoded | str]:
        """Read byte ranges; for each its bytes, or the text of an error that concerns it alone."""


class OpenFiles:
    """The open files of this process, shared by all of its storages and threads.

    A file stays open after a read until the open files that nobody reads exceed a quarter of what
    RLIMIT_NOFILE allows, or it is reached: the rest is for sockets, workers and libraries. A read
    has its descriptor to itself, so that no thread closes a file that another one reads.
    """

    _MOST = 1024

    def __init__(self) -> None:
        self._idle: OrderedDict[tuple[object, str], list[int]] = OrderedDict()
        self._count = 0
        self._lock = threading.RLock()  # reentrant: garbage collection may call forget anywhere

    @contextmanager
    def descriptor(self, owner: object, path: str) -> Iterator[int]:
        """Lend a descriptor of a file; an error in the block closes it."""
        key = owner, path
        with self._lock:
            descriptor = self._take(key) if key in self._idle else None
        if descriptor is None:
            descriptor = self._open(path)
        try:
            yield descriptor
        except BaseException:
            os.close(descriptor)
            raise
        with self._lock:
            self._idle.setdefault(key, []).append(descriptor)
            self._idle.move_to_end(key)
            self._count += 1
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._keep(self._MOST if soft < 0 else min(self._MOST, soft // 4))

    def forget(self, owner: object) -> None:
        """Close the files of a storage."""
        with self._lock:
            for key in [key for key in self._idle if key[0] is owner]:
                while key in self._idle:
                    os.close(self._take(key))

    def _open(self, path: str) -> int:
        while True:
            try:
                return open_regular(path)[0]
            except OSError as error:
                with self._lock:
                    if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._count:
                        raise
                    self._keep(0)

    def _keep(self, most: int) -> None:
        """Close all idle descriptors but ``most``, those unused for longest first."""
        while self._count > most:
            os.close(self._take(next(iter(self._idle))))

    def _take(self, key: tuple[object, str]) -> int:
        descriptor = self._idle[key].pop()
        self._count -= 1
        if not self._idle[key]:
            del self._idle[key]
        return descriptor


FILES = OpenFiles()


def open_regular(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Open a file that reading will not wait for; return its descriptor and size in bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(0, "it is not a regular file")
    return descriptor, status.st_size


def read_exactly(descriptor: int, offset: int, length: int) -> Encoded:
    """Return the bytes of a range of an open file."""
    content = np.empty(length, dtype=np.uint8)
    done = 0
    while done < length:
        count = os.preadv(descriptor, [content.data[done:]], offset + done)
        if not count:
            raise OSError(0, f"it is {length - done:,} bytes too short")
        done += count
    return content


def reason(error: OSError) -> str:
    """Return the text of a system error with its symbol, such as ``Stale file handle (ESTALE)``."""
    symbol = errno.errorcode.get(error.errno or 0)
    return f"{error.strerror or error}{f' ({symbol})' if symbol else ''}"


def too_large(size: str, most: int) -> str:
    """Say that a file has more bytes than a limit."""
    return f"it has {size} bytes; valid: at most {most:,}"


class LocalStorage(Storage):
    """The files of a local folder, a few of which stay open (:class:`OpenFiles`)."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)
        # Files that were replaced since are opened anew by a storage made after that.
        self._owner = object()
        weakref.finalize(self, FILES.forget, self._owner)

    def where(self, file: str) -> str:
        return os.path.join(self._folder, file)

    def sizes(self, files: Sequence[str]) -> list[int | None]:
        return [self._size(file) for file in files]

    def content(self, file: str) -> bytes | None:
        size = self._size(file)
        if size is None:
            return None
        content = self._read(ByteRange(file, 0, size), MOST_INDEX_BYTES)
        if isinstance(content, str):
            raise DataError(f"{self.where(file)} {content}")
        return content.tobytes()

    def read(self, ranges: Sequence[ByteRange]) -> list[Encoded | str]:
        found: list[Encoded | str] = [""] * len(ranges)
        # Sorted by file, so that each file is opened at most once per call.
        for number in sorted(range(len(ranges)), key=ranges.__getitem__):
            found[number] = self._read(ranges[number], MOST_IMAGE_BYTES)
        return found

    def _size(self, file: str) -> int | None:
        try:
            return os.stat(self.where(file)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DataError(f"{self.where(file)} cannot be read: {reason(error)}") from error

    def _read(self, wanted: ByteRange, most: int) -> Encoded | str:
        if wanted.length > most:
            return f"cannot be read: {too_large(f'{wanted.length:,}', most)}"
        failure = ""
        for _ in range(_ATTEMPTS):  # each with a descriptor of its own
            try:
                with FILES.descriptor(self._owner, self.where(wanted.file)) as descriptor:
                    return read_exactly(descriptor, wanted.offset, wanted.length)
            except OSError as error:
                failure = f"cannot be read: {reason(error)}"
        return failure
