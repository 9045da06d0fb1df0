"""Which process is which, and whether it lives: for locks and shared studies."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..files import whole

#: What a process number belongs to: containers of one host may share its name.
_PLACE = ("machine", "boot", "namespace")


def this_process() -> dict[str, Any]:
    """This process, as others can look for it.

    Returns:
        ``machine``, ``boot`` and ``namespace``, to which its number belongs; ``process``, the
        number; and ``started``, when it started.
    """
    process = os.getpid()
    return {
        "machine": socket.gethostname(),
        "boot": _content("/proc/sys/kernel/random/boot_id"),
        "namespace": _target("/proc/self/ns/pid"),
        "process": process,
        "started": _started(process),
    }


def is_here(other: Mapping[str, Any]) -> bool:
    """Whether a process, from :func:`this_process`, can be looked for on this machine.

    Not so if ``other`` is damaged.
    """
    mine, started = this_process(), other.get("started", 0)
    if not 0 < (whole(other.get("process")) or 0) < 2**31 or not isinstance(started, str | None):
        return False
    return all(other.get(key, mine[key]) == mine[key] for key in _PLACE)


def lives(other: Mapping[str, Any]) -> bool:
    """Whether a process that can be looked for here has not ended."""
    number = other["process"]
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user, whose processes may be hidden
    started = _started(number)
    return started is None or started == other["started"]


@contextmanager
def touched(
    path: Path, every_seconds: float, still: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Context manager that touches a file that exists at intervals, as a sign of life.

    Args:
        path: The file.
        every_seconds: Length of an interval.
        still: Whether the file is to be touched still.
    """
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(every_seconds):
            with suppress(OSError):
                if still():
                    os.utime(path)

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
        OSError: The file is not there.
    """
    last = path.lstat().st_mtime
    now = path.with_name(f".now-{uuid4().hex}")
    try:
        now.touch()
        return now.stat().st_mtime - last
    except OSError:  # the folder cannot be written: take it to be alive
        return 0.0
    finally:
        with suppress(OSError):
            now.unlink(missing_ok=True)


def age_seconds() -> float:
    """Seconds since this process started; 0 where that cannot be seen."""
    started = _started(os.getpid())
    if started is None:
        return 0.0
    # In ticks since the start of the machine.
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, since_boot - int(started) / os.sysconf("SC_CLK_TCK"))


def _started(process: int) -> str | None:
    """When a process of this machine started, in ticks; None if that cannot be seen."""
    text = _content(f"/proc/{process}/stat")
    fields = text.rpartition(")")[2].split()  # the name may hold spaces
    if not fields:
        return None
    return "ended" if fields[0] in "ZX" else fields[19]


def _content(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _target(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)
    return ""
