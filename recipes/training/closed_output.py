"""A run whose output nobody reads any longer goes on, and writes it into its folder instead.

``| head`` closes the pipe, as does a ``tee`` that has ended; a terminal may be gone. Whatever then
prints, be it a progress bar or a user's callback, would end the run with an error.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

#: The file in the run's folder.
OUTPUT = "output.log"

#: Errors of a write to a pipe that is closed, and to a terminal that is gone.
_CLOSED = (errno.EPIPE, errno.EIO)


@contextmanager
def going_on() -> Iterator[None]:
    """Context manager in which a closed standard output, or standard error, ends nothing.

    What is written after that goes to :data:`OUTPUT` in the folder that :func:`follow` is given.
    Output that was redirected within Python stays as it is.
    """
    before = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _lasting(sys.stdout, "standard output")
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _lasting(sys.stderr, "standard error")
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def follow(folder: Path) -> None:
    """Write output that nobody reads to a file in the run's folder, which exists."""
    for stream in (sys.stdout, sys.stderr):
        raw = getattr(stream, "buffer", None)
        if isinstance(raw, _Lasting):
            raw.follow(folder / OUTPUT)


def _lasting(stream: Any, name: str) -> io.TextIOWrapper:
    stream.flush()
    return io.TextIOWrapper(
        _Lasting(stream.fileno(), name),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Lasting(io.FileIO):
    """A file descriptor that becomes that of a file once nobody reads it.

    So output of libraries in C, and of child processes, goes there too.
    """

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, "wb", closefd=False)
        self._name, self._path = name, Path(os.devnull)
        self._kept: bytes | None = None  # what was written since, before there was a folder

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        length = len(rest)
        try:
            while rest:
                rest = rest[super().write(rest) or 0 :]
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            line = f"largebatch: warning: nobody reads {self._name} any longer; the run goes on\n"
            self._kept = (self._kept or line.encode()) + rest
            self._open()
        else:
            if self._kept is not None:
                self._kept += bytes(memoryview(data).cast("B"))
        return length

    def follow(self, path: Path) -> None:
        """Go on in the file of this name."""
        self._path = path
        if self._kept is not None:
            self._open()

    def _open(self) -> None:
        with suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, self.fileno())
            os.close(file)
            if self._path != Path(os.devnull):
                kept, self._kept = self._kept or b"", None
                os.write(self.fileno(), kept)
