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
from .names import LOCK

#: Time after which a holder that cannot be looked for and gives no sign of life counts as gone.
PATIENCE_SECONDS = 120.0
#: Time between its signs of life.
_BEAT_SECONDS = 10.0
_POLL_SECONDS = 2.0
#: Time for which a lock that was taken over has to stay before it counts as held.
_SETTLE_SECONDS = 2.0
#: What a process number belongs to: containers of one host may share its name.
_PLACE = ("machine", "boot", "namespace")
_Seen = tuple[dict[str, Any], float]  # content of a lock, its heartbeat


@dataclass(frozen=True)
class RunLock:
    """The lock of a folder, held by this process."""

    path: Path  # the file
    content: dict[str, Any]  # what this process wrote into it
    notice: str  # a line about the lock that it took over; empty if there was none

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
    """Context manager in which this process alone writes into a run folder that exists."""
    path, notice = folder / LOCK, ""
    mine = {**this_process(), "id": uuid4().hex}
    while not _create(path, mine):
        with suppress(FileNotFoundError):  # it has just been freed
            seen = _look(path)
            _check_ended(path, seen, say)
            if _take_over(path, seen, mine):
                notice = f"the lock of {_name(seen[0])} is taken over: it has ended"
                break
    held = RunLock(path, mine, notice)
    try:
        with heartbeat(path, _BEAT_SECONDS, still=lambda: not held.is_lost):
            yield held
    finally:
        with suppress(OSError):
            if not held.is_lost:
                path.unlink()


def holder(folder: Path) -> tuple[str, bool] | None:
    """Return who holds the lock of a run's folder, and whether it lives; None if it is free."""
    try:
        content, beat = _look(folder / LOCK)
    except OSError:
        return None
    lives = _lives(content)
    return _name(content), abs(time.time() - beat) <= PATIENCE_SECONDS if lives is None else lives


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
    """The content of a lock, empty if it is damaged or being written, and its heartbeat."""
    beat = path.lstat().st_mtime
    return object_in(path), beat


def _check_ended(path: Path, seen: _Seen, say: Callable[[str], None]) -> None:
    """Raise RecipeError if the holder of a lock lives, or another one takes it meanwhile."""
    lives, now = _lives(seen[0]), seen
    if lives is None:
        # Clocks of machines may differ: at least two signs of life are waited for in any case.
        silent = max(0.0, time.time() - seen[1])
        patience = max(PATIENCE_SECONDS - silent, min(PATIENCE_SECONDS, 2 * _BEAT_SECONDS))
        who = f"{path.parent} is locked by {_name(seen[0])}"
        say(f"run_dir: {who}; waiting up to {patience:.0f} s for a sign of life")
        end = time.monotonic() + patience
        while now == seen and (left := end - time.monotonic()) > 0:
            time.sleep(min(_POLL_SECONDS, left))
            now = _look(path)
    if lives or now != seen:
        raise RecipeError(
            f"run_dir: {path.parent} is in use by {_name(now[0])}; valid: another run_dir, or "
            "this one once that run has ended"
        )


def _take_over(path: Path, judged: _Seen, mine: dict[str, Any]) -> bool:
    """Replace the lock of a holder that has ended; whether this process holds it now."""
    # Its name is never free meanwhile, so that nobody creates one. Of several processes that judged
    # the same lock, the last to replace it holds it: each looks again once all have had the time.
    own = path.with_name(f"{LOCK}-{mine['id']}")
    try:
        own.write_text(json.dumps(mine))
        if _look(path) != judged:
            return False
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)
    time.sleep(_SETTLE_SECONDS)
    return object_in(path) == mine


def _name(content: dict[str, Any]) -> str:
    process = whole(content.get("process"))
    if process is None:
        return "a process that left no name"
    return f"process {process} of {text(content.get('machine'))}"


def this_process() -> dict[str, Any]:
    """This process, as others can look for it: a number, when it started, and where that counts."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    place = (socket.gethostname(), _content("/proc/sys/kernel/random/boot_id"), namespace)
    number = {"process": os.getpid(), "started": _start_of(os.getpid())}
    return {**dict(zip(_PLACE, place, strict=True)), **number}


def _lives(other: Mapping[str, Any]) -> bool | None:
    """Whether a process, from :func:`this_process`, has not ended; None if that cannot be seen."""
    here, process, started = this_process(), whole(other.get("process")), other.get("started")
    is_here = all(other.get(key) == here[key] for key in _PLACE)
    if not (is_here and process and process < 2**31 and isinstance(started, str)):
        return None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user, whose processes may be hidden
    return _start_of(process) in (None, started)


def _start_of(process: int) -> str | None:
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
def heartbeat(
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
