"""The lock of a run folder: two runs that write into one would spoil each other's files.

A requeued job that overlaps its predecessor is such a case. The lock is a lease of the package
filelock: a file that one process creates and touches at intervals. It is taken over once its
process has ended on this machine, or has given no sign of life for some time, as after it was
suspended; a process that lost its lock in this way can see that.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from filelock import LeaseSettingsMismatch, OwnerRecord, SoftFileLease, Timeout

from ...errors import RecipeError
from .names import LOCK

#: Time after which a holder that gives no sign of life counts as gone.
PATIENCE_SECONDS = 120.0
_BEAT_SECONDS = 10.0  # between its signs of life
_POLL_SECONDS = 0.5
_MOST_SECONDS = 240.0  # for which a lock that cannot be taken over is waited for in all


class RunLock:
    """The lock of a folder, held by this process."""

    def __init__(self, lease: SoftFileLease, notice: str) -> None:
        self._lease = lease
        self.notice = notice  # a line about the lock that it took over; empty if there was none

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the lock over. False where it cannot be read."""
        try:
            return str(self._lease.token) not in Path(self._lease.lock_file).read_text()
        except FileNotFoundError:
            return True
        except OSError:
            return False


@contextmanager
def locked(folder: Path, say: Callable[[str], None] = lambda line: None) -> Iterator[RunLock]:
    """Context manager in which this process alone writes into a run folder that exists."""
    lease, before, notice = _lease(folder), _look(folder), ""
    if before:
        name, lives = _judged(*before)
        if lives is None:
            who = f"{folder} is locked by {name}"
            say(f"run_dir: {who}; waiting up to {PATIENCE_SECONDS:.0f} s for a sign of life")
        notice = f"the lock of {name} is taken over: it has ended"

    def is_in_use() -> bool:  # by one that lives, or that was quicker than this process
        now = _look(folder)
        return now is not None and (now != before or bool(_judged(*now)[1]))

    try:
        held = lease.acquire(_MOST_SECONDS, _POLL_SECONDS, cancel_check=is_in_use)
    except (Timeout, LeaseSettingsMismatch):  # the latter of another version, or damaged
        now = _look(folder)
        name = _judged(*now)[0] if now else "another process"
        raise RecipeError(
            f"run_dir: {folder} is in use by {name}; valid: another run_dir, or this one once that "
            "run has ended"
        ) from None
    with held:
        yield RunLock(lease, notice)


def holder(folder: Path) -> tuple[str, bool] | None:
    """Return who holds the lock of a run's folder, and whether it lives; None if it is free."""
    found = _look(folder)
    if found is None:
        return None
    name, lives = _judged(*found)
    return name, abs(time.time() - found[1]) <= PATIENCE_SECONDS if lives is None else lives


def is_held_here(folder: Path) -> bool:
    """Whether this process holds the lock of a run's folder."""
    return _lease(folder).is_lock_held_by_us


def _lease(folder: Path) -> SoftFileLease:
    return SoftFileLease(
        folder / LOCK,
        lease_duration=PATIENCE_SECONDS,
        heartbeat_interval=_BEAT_SECONDS,
        thread_local=False,
    )


def _look(folder: Path) -> tuple[OwnerRecord | None, float] | None:
    """The owner of a lock, None if it names none, and its last sign of life; None if it is free."""
    try:
        return _lease(folder).owner, (folder / LOCK).lstat().st_mtime
    except OSError:
        return None


def _judged(owner: OwnerRecord | None, beat: float) -> tuple[str, bool | None]:
    """The name of an owner, and whether it lives; None if that cannot be seen."""
    if owner is None:
        return "a process that left no name", None
    name = f"process {owner.pid} of {owner.hostname.partition('?')[0]}"
    if owner.hostname != _this_machine():
        return name, None
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return name, False
    except PermissionError:
        pass  # of another user
    # One without a sign of life is suspended, or its number belongs to another process by now.
    return name, True if abs(time.time() - beat) <= PATIENCE_SECONDS else None


@cache
def _this_machine() -> str:
    """The name that filelock gives this machine, or container: process numbers count within it."""
    with tempfile.TemporaryDirectory() as folder, _lease(Path(folder)):
        owner = _lease(Path(folder)).owner
    assert owner is not None
    return owner.hostname
