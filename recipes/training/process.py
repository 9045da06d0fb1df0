"""Which process is which, and whether it lives: for locks and shared studies."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """This process, as others can look for it: ``machine``, ``process`` and ``started``."""
    process = os.getpid()
    return {"machine": socket.gethostname(), "process": process, "started": started(process)}


def started(process: int) -> str | None:
    """When a process of this machine started, in ticks; None if there is none of this number."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name may hold spaces
    return None if fields[0] in "ZX" else fields[19]


@contextmanager
def touched(path: Path, every_seconds: float) -> Iterator[None]:
    """Context manager that touches a file now and at intervals, as a sign of life."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(every_seconds):
            with suppress(OSError):
                os.utime(path)

    path.touch()
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def seconds_since_touched(path: Path) -> float:
    """Seconds since a file was touched, by the clock of its file system, which machines share.

    Raises:
        OSError: The file is not there, or its folder cannot be written.
    """
    now = path.with_name(f".now-{os.getpid()}")
    now.touch()
    try:
        return now.stat().st_mtime - path.stat().st_mtime
    finally:
        now.unlink(missing_ok=True)
