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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from ...errors import RecipeError
from ...files import DamagedFileError, number, object_in, read_object, text, whole
from ..process import is_here, lives, seconds_since_touched, this_process, touched

LOCK = ".lock"
#: Time after which a holder that cannot be looked for and gives no sign of life counts as gone.
PATIENCE_SECONDS = 120.0
_BEAT_SECONDS = _SAY_SECONDS = 10.0
_POLL_SECONDS = 2.0
_Seen = tuple[dict[str, Any], int, int]


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
        say: Shows a line about such a wait, at once and every 10 s.

    Raises:
        RecipeError: Another process holds the lock.
        OSError: The lock cannot be written.
    """
    path = folder / LOCK
    mine = {**this_process(), "since": time.time(), "id": uuid4().hex}
    held = RunLock(path, mine, _take(path, mine, say))
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


def _take(path: Path, mine: dict[str, Any], say: Callable[[str], None]) -> str:
    """Write the lock; return a line about one that it takes over."""
    notice = ""
    while not _create(path, mine):
        with suppress(FileNotFoundError):  # it has just been freed
            seen = _look(path)
            if _has_ended(path, seen, say) and _remove(path, seen):
                notice = f"the lock of {_name(seen[0])} is taken over: it has ended"
    return notice


def _create(path: Path, content: dict[str, Any]) -> bool:
    """Write the lock, unless there is one; return whether it was written."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(file, "w") as opened:
            opened.write(json.dumps(content))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _look(path: Path) -> _Seen:
    """The content of a lock, empty if it is damaged or being written; its inode; its heartbeat."""
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
    # A date in the future says nothing about now: then only a new heartbeat counts.
    silent = max(0.0, seconds_since_touched(path))
    end, said = time.monotonic() + PATIENCE_SECONDS - silent, -_SAY_SECONDS
    while (left := end - (now := time.monotonic())) > 0:
        if now - said >= _SAY_SECONDS:
            said = now
            who = f"{path.parent} is locked by {_name(seen[0])}"
            say(f"run_dir: {who}; waiting up to {left:.0f} s for a sign of life")
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
    since = number(seen[0].get("since"))
    when = time.localtime(since if since and 0 < since < 2**40 else seen[2] / 1e9)
    return RecipeError(
        f"run_dir: {path.parent} is in use by {_name(seen[0])} since "
        f"{time.strftime('%Y-%m-%d %H:%M:%S', when)}; valid: another run_dir, or this one once "
        "that run has ended"
    )


def _name(found: dict[str, Any]) -> str:
    process = whole(found.get("process"))
    if process is None:
        return "a process that left no name"
    return f"process {process} of {text(found.get('machine'))}"
