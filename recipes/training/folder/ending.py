"""How a run ended, ``ending.json``, as rank 0 writes it, and the machine and versions that it had.

A run that begins or goes on removes the file. So a folder without it, whose lock is that of a
process that is gone, is that of a run that was killed.
"""

from __future__ import annotations

import json
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...errors import StorageError, TrainingError, user_errors
from ...files import write_text
from .names import ENDING
from .outcome import Status

_PACKAGES = (
    *("torch", "torchvision", "timm", "nvidia-dali-cuda130", "nvidia-dali-cuda120"),
    *("nvidia-nvimgcodec-cu13", "nvidia-nvimgcodec-cu12", "numpy"),
)


@contextmanager
def recorded(
    folder: Path,
    why_stopped: Callable[[], str | None],
    is_ours: Callable[[], bool],
    facts: Callable[[], dict[str, Any]] = dict,
) -> Iterator[None]:
    """Context manager that records how its body, a run, ends, if its folder still ``is_ours``."""
    (folder / ENDING).unlink(missing_ok=True)
    try:
        yield
        end = ending_of(None, why_stopped())
    except BaseException as error:
        end = ending_of(error)
        raise
    finally:
        if is_ours():
            record(folder, *end, facts())


def record(
    folder: Path, status: Status, reason: str, facts: Mapping[str, Any] | None = None
) -> None:
    """Write how a run ended, if that can be written."""
    about = {"status": status, "reason": " ".join(reason.split()), "time": time.time()}
    about |= facts or {}
    with suppress(OSError):  # such as on a full disk, which may be why the run ends
        write_text(folder / ENDING, json.dumps(about, indent=2) + "\n")


def ending_of(error: BaseException | None, why_stopped: str | None = None) -> tuple[Status, str]:
    """How a run ends that raised ``error``, or that a callback stopped for a reason; and why."""
    if error is None:
        return ("finished", "") if why_stopped is None else ("stopped", why_stopped)
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        with suppress(ValueError):
            return "stopped", signal.Signals(error.code - 128).name
    if isinstance(error, KeyboardInterrupt):
        return "stopped", signal.Signals.SIGINT.name
    if isinstance(error, TrainingError) and not isinstance(error, StorageError):
        return "diverged", error.problem
    if isinstance(error, user_errors()):
        return "failed", getattr(error, "problem", str(error))
    return "failed", f"{type(error).__name__}: {error}"


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that results depend on, by name."""
    found = {}
    for package in ("largebatch", *_PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
