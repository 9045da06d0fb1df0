"""The lock of a run folder: two runs that write into one would spoil each other's files.

A requeued job that overlaps its predecessor is such a case. The lock is a file that only one
process can create. It holds the process's host, number and start, and the time of its last change
is the process's heartbeat. It is taken over only if that process has provably ended, or its
heartbeat has stood still for some time. A process that lost its lock in this way, as after it was
suspended, can see that.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from ...errors import RecipeError
from ...files import DamagedFileError, object_in, read_object, text, whole
from .names import LOCK as LOCK

#: Time after which a holder that cannot be looked for and gives no sign of life counts as gone.
PATIENCE_SECONDS = 120.0
#: Time between its signs of life.
_BEAT_SECONDS = 10.0
_POLL_SECONDS = 2.0
#: What a process number belongs to: containers of one host may share its name.
_PLACE = ("machine", "boot", "namespace")
_Seen = tuple[dict[str, Any], int, int]  # content of a lock, its inode, its heartbeat


@dataclass(frozen=True)
class RunLock:
    """The lock of a folder, held by this process.

    Attributes:
        path: The file.
        content: What this process wrote into it.
        notice: A line about the lock that it took over; empty if there was none.
    """

    path: Path
    content: dict[str, Any]
    notice: str

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the lock over. False where it cannot be read."""
        try:
            return read_object(self.path) != self.content
        except FileNotFoundError:
            return True
        except (OSError, DamagedFileError):
            return False


@contextmanager
def locked(folder: Path, say: Callable[[str], None] = lambda line: None) -> Iterator[RunLock]:
    """Context manager in which this process alone writes into a run folder that exists.

    It may wait for :data:`PATIENCE_SECONDS`, to see whether the process of another machine lives.

    Args:
        folder: The folder.
        say: Shows a line about such a wait.

    Raises:
        RecipeError: Another process holds the lock.
        OSError: The lock cannot be written.
    """
    path, notice = folder / LOCK, ""
    mine = {**this_process(), "id": uuid4().hex}
    while not _create(path, mine):
        with suppress(FileNotFoundError):  # it has just been freed
            seen = _look(path)
            if _has_ended(path, seen, say) and _remove(path, seen):
                notice = f"the lock of {_name(seen[0])} is taken over: it has ended"
    held = RunLock(path, mine, notice)
    try:
        with touched(path, _BEAT_SECONDS, still=lambda: not held.is_lost):
            yield held
    finally:
        with suppress(OSError):
            if not held.is_lost:
                path.unlink()


def holder(folder: Path) -> tuple[str, bool] | None:
    """Return who holds the lock of a run's folder, and whether it lives; None if it is free.

    Nothing is written and nothing waited for: of another machine's process, the last heartbeat is
    compared with this machine's clock.
    """
    try:
        found, _, beat = _look(folder / LOCK)
    except OSError:
        return None
    is_recent = abs(time.time() - beat / 1e9) <= PATIENCE_SECONDS
    return _name(found), lives(found) if is_here(found) else is_recent


def _create(path: Path, content: dict[str, Any]) -> bool:
    """Write the lock, unless there is one; return whether it was written."""
    try:
        with path.open("x") as file:
            file.write(json.dumps(content))
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _look(path: Path) -> _Seen:
    """Read a lock; the content is empty if it is damaged or being written."""
    found = path.lstat()
    return object_in(path), found.st_ino, found.st_mtime_ns


def _has_ended(path: Path, seen: _Seen, say: Callable[[str], None]) -> bool:
    """Whether the holder of a lock has ended; False if another one has taken it meanwhile.

    Raises:
        RecipeError: It lives.
    """
    if is_here(seen[0]):
        if lives(seen[0]):
            raise _in_use(path, seen)
        return True
    # Clocks of machines may differ: at least two signs of life are waited for in any case.
    silent = max(0.0, time.time() - seen[2] / 1e9)
    patience = max(PATIENCE_SECONDS - silent, min(PATIENCE_SECONDS, 2 * _BEAT_SECONDS))
    who = f"{path.parent} is locked by {_name(seen[0])}"
    say(f"run_dir: {who}; waiting up to {patience:.0f} s for a sign of life")
    end = time.monotonic() + patience
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(_POLL_SECONDS, left))
        latest = _look(path)
        if latest[:2] != seen[:2]:
            return False
        if latest != seen:
            raise _in_use(path, seen)
    return True


def _remove(path: Path, judged: _Seen) -> bool:
    """Remove the lock of a holder that has ended; put back that of one which was quicker."""
    aside = path.with_name(f"{LOCK}-{uuid4().hex}")
    path.rename(aside)
    is_judged = _look(aside) == judged
    with suppress(OSError):
        if not is_judged:
            os.link(aside, path)
        aside.unlink()
    return is_judged


def _in_use(path: Path, seen: _Seen) -> RecipeError:
    return RecipeError(
        f"run_dir: {path.parent} is in use by {_name(seen[0])}; valid: another run_dir, or this "
        "one once that run has ended"
    )


def _name(found: dict[str, Any]) -> str:
    process = whole(found.get("process"))
    if process is None:
        return "a process that left no name"
    return f"process {process} of {text(found.get('machine'))}"


# --- processes, as others see them -----------------------------------------------------------


def this_process() -> dict[str, Any]:
    """This process, as others can look for it: a number, when it started, and where that counts."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    place = (socket.gethostname(), _content("/proc/sys/kernel/random/boot_id"), namespace)
    number = {"process": os.getpid(), "started": start_of(os.getpid())}
    return {**dict(zip(_PLACE, place, strict=True)), **number}


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
    try:
        os.kill(other["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user, whose processes may be hidden
    started = start_of(other["process"])
    return started is None or started == other["started"]


def start_of(process: int) -> str | None:
    """When a process of this machine started, in ticks; None if that cannot be seen."""
    fields = _content(f"/proc/{process}/stat").rpartition(")")[2].split()  # names may hold spaces
    if not fields:
        return None
    return "ended" if fields[0] in "ZX" else fields[19]


def _content(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


@contextmanager
def touched(
    path: Path, every_seconds: float, still: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Context manager that touches a file at intervals, as a sign of life, while ``still()``."""
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
