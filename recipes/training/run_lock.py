"""The lock of a run folder: two runs that write into one would spoil each other's files.

A requeued job that overlaps its predecessor is such a case. The lock is a file with the process
that holds it. It is broken only if that process has provably ended, or has given no sign of life
for some time.
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
from .process import seconds_since_touched, started, this_process, touched

LOCK = ".lock"
#: Time after which a holder whose process cannot be looked for counts as gone.
PATIENCE_SECONDS = 300.0
_BEAT_SECONDS = 20.0
_TRIES = 5


@contextmanager
def locked(folder: Path) -> Iterator[str]:
    """Context manager in which this process alone writes into a run folder that exists.

    Yields:
        A line about a lock that was left by a process that has ended; empty if there was none.

    Raises:
        RecipeError: Another process holds the lock.
        OSError: The lock cannot be written.
    """
    path = folder / LOCK
    mine = _me()
    broken = _take(path, mine)
    try:
        with touched(path, _BEAT_SECONDS):
            yield broken
    finally:
        with suppress(OSError, ValueError):
            if json.loads(path.read_text()) == mine:
                path.unlink()


def _take(path: Path, mine: dict[str, Any]) -> str:
    """Write the lock; return a line about one that it replaces."""
    broken = ""
    for _ in range(_TRIES):
        # With its content at once, for others may read it at any time.
        written = path.with_name(f"{LOCK}-{uuid4().hex}")
        written.write_text(json.dumps(mine))
        try:
            os.link(written, path)
        except FileExistsError:
            pass
        else:
            return broken
        finally:
            written.unlink()
        try:
            holder: dict[str, Any] = json.loads(path.read_text())
            silent = seconds_since_touched(path)
        except FileNotFoundError:
            continue  # it has just been freed
        except ValueError:
            holder, silent = {}, PATIENCE_SECONDS + 1
        whose = f"process {holder.get('process')} of {holder.get('machine')}"
        if not _is_gone(holder, mine, silent):
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
            raise RecipeError(
                f"run_dir: {path.parent} is in use by {whose} since {since}; valid: another "
                f"run_dir, or this one once it has ended (or {PATIENCE_SECONDS:g} s after its last "
                "sign of life)"
            )
        broken = f"the lock of {whose} is taken over: it has ended"
        # Only one of several processes that see this can move it away.
        with suppress(FileNotFoundError):
            aside = path.with_name(f"{LOCK}-{uuid4().hex}")
            path.rename(aside)
            aside.unlink()
    raise RecipeError(
        f"run_dir: {path.parent} is being taken by other processes; valid: another run_dir"
    )


def _is_gone(holder: dict[str, Any], mine: dict[str, Any], silent: float) -> bool:
    """Whether the holder of a lock has ended: provably, or by all signs."""
    if all(holder.get(key) == mine[key] for key in ("machine", "boot", "namespace")):
        return bool(started(holder["process"]) != holder["started"])
    # torchrun ends all processes of a job before it starts them again.
    job = holder.get("job")
    if job and job == mine["job"] and holder.get("restart", 0) < mine["restart"]:
        return True
    return silent > PATIENCE_SECONDS


def _me() -> dict[str, Any]:
    """This process and its job; process numbers are those of one boot and one namespace."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return {
        **this_process(),
        "boot": _line("/proc/sys/kernel/random/boot_id"),
        "namespace": _link("/proc/self/ns/pid"),
        "job": None if job == "none" else job,
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "since": time.time(),
    }


def _line(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _link(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)
    return ""
