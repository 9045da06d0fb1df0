"""The lock of a run folder: two runs that write into one would spoil each other's files.

A requeued job that overlaps its predecessor is such a case. The lock is a file with the process
that holds it, which touches the file as a sign of life. It is taken over only if that process has
provably ended, or has given no sign of life for some time. A process that lost its lock in this
way, as after it was suspended, can see that.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..errors import RecipeError
from .process import is_here, lives, seconds_since_touched, this_process, touched

LOCK = ".lock"
#: Time after which a holder that cannot be looked for and gives no sign of life counts as gone.
PATIENCE_SECONDS = 120.0
_BEAT_SECONDS = 10.0
_POLL_SECONDS = 2.0


class RunLock:
    """The lock of a folder, held by this process.

    Args:
        path: The file.
        content: What this process wrote into it.
        notice: A line about the lock that it took over; empty if there was none.
    """

    def __init__(self, path: Path, content: dict[str, Any], notice: str) -> None:
        self._path, self._content, self.notice = path, content, notice

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the lock over. False where it cannot be read."""
        try:
            return _read(self._path) != self._content
        except FileNotFoundError:
            return True
        except OSError:
            return False


@contextmanager
def locked(folder: Path) -> Iterator[RunLock]:
    """Context manager in which this process alone writes into a run folder that exists.

    It may wait for :data:`PATIENCE_SECONDS`, to see whether the process of another machine lives.

    Raises:
        RecipeError: Another process holds the lock.
        OSError: The lock cannot be written.
    """
    path = folder / LOCK
    mine = {**this_process(), "since": time.time(), "id": uuid4().hex}
    held = RunLock(path, mine, _take(path, mine))
    try:
        with touched(path, _BEAT_SECONDS, still=lambda: not held.is_lost):
            yield held
    finally:
        with suppress(OSError):
            if not held.is_lost:
                path.unlink()


def holder(folder: Path) -> tuple[str, bool] | None:
    """Return who holds the lock of a run's folder, and whether it lives; None if it is free.

    Nothing is written and nothing waited for: of another machine's process, the last sign of life
    is compared with this machine's clock.
    """
    path = folder / LOCK
    try:
        found = _read(path)
        silent = time.time() - path.stat().st_mtime
    except OSError:
        return None
    if "process" in found and is_here(found):
        return _name(found), lives(found)
    return _name(found), silent <= PATIENCE_SECONDS


def _take(path: Path, mine: dict[str, Any]) -> str:
    """Write the lock; return a line about one that it takes over."""
    notice = ""
    while not _write(path, mine):
        try:
            holder = _read(path)
        except FileNotFoundError:
            continue  # it has just been freed
        if holder == mine:  # the answer to the first try was lost on the network
            break
        if not _is_gone(path, holder):
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("since", 0)))
            raise RecipeError(
                f"run_dir: {path.parent} is in use by {_name(holder)} since {since}; valid: "
                "another run_dir, or this one once that run has ended"
            )
        if _move_away(path, holder):
            notice = f"the lock of {_name(holder)} is taken over: it has ended"
    return notice


def _write(path: Path, content: dict[str, Any]) -> bool:
    """Write the lock with its content at once, unless there is one; return whether it was."""
    written = path.with_name(f"{LOCK}-{content['id']}")
    text = json.dumps(content)
    try:
        written.write_text(text)
        os.link(written, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(file, "w") as opened:
                opened.write(text)
        except OSError:
            path.unlink(missing_ok=True)
            raise
    finally:
        with suppress(OSError):
            written.unlink(missing_ok=True)
    return True


def _read(path: Path) -> dict[str, Any]:
    """The content of a lock; empty while it is being written, or if it is damaged."""
    try:
        found: Any = json.loads(path.read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _move_away(path: Path, judged: dict[str, Any]) -> bool:
    """Remove the lock of a holder that is gone; put back that of another one which was quicker."""
    aside = path.with_name(f"{LOCK}-{uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return False
    if (found := _read(aside)) != judged:
        with suppress(OSError):
            os.link(aside, path) if found else None
    aside.unlink(missing_ok=True)
    return found == judged


def _is_gone(path: Path, holder: dict[str, Any]) -> bool:
    """Whether the holder of a lock has ended: provably, or by all signs, which may take a while."""
    if "process" in holder and is_here(holder):
        return not lives(holder)
    try:
        first = path.stat().st_mtime_ns
        while (silent := seconds_since_touched(path)) <= PATIENCE_SECONDS:
            time.sleep(min(_POLL_SECONDS, PATIENCE_SECONDS - silent + 0.01))
            if path.stat().st_mtime_ns != first:
                return False
    except FileNotFoundError:
        pass  # it has just been freed
    return True


def _name(holder: dict[str, Any]) -> str:
    if "process" not in holder:
        return "a process that left no name"
    return f"process {holder['process']} of {holder.get('machine')}"
