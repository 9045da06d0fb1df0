"""A file that grows by whole pieces, and keeps those in memory that the disk has no room for."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class AppendedFile:
    """A file to which pieces are appended, in their order and each as a whole.

    Args:
        path: The file, which is made if it is not there.
        size: Length of what it holds already, in bytes.

    Attributes:
        waiting: What could not be written yet.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        self._file, self._size = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), size
        self.waiting = b""

    def append(self, piece: bytes) -> None:
        """Append a piece after those that wait.

        Raises:
            OSError: It cannot be written; it waits.
        """
        self.waiting += piece
        self.flush()

    def flush(self) -> None:
        """Write what waits.

        Raises:
            OSError: It cannot be written; it waits.
        """
        # At the end of the last whole piece, as a try before may have left a part of one.
        done = 0
        while done < len(self.waiting):
            done += os.pwrite(self._file, self.waiting[done:], self._size + done)
        self._size, self.waiting = self._size + done, b""

    def close(self) -> None:
        """Close the file, without writing what waits."""
        with suppress(OSError):
            os.close(self._file)
