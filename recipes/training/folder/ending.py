"""How a run ended, ``ending.json``, and its results, ``summary.json``, as rank 0 writes them.

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
from .names import ENDING, SUMMARY
from .outcome import Status, column, images_in, metrics_of, step_waits

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
    """Context manager that records how its body, a run, ends.

    Args:
        folder: The run's folder.
        why_stopped: Why a callback stopped the run; None if none did.
        is_ours: Whether the folder is still this run's at the end; nothing is written otherwise.
        facts: What to record besides, by name.
    """
    with suppress(FileNotFoundError):
        (folder / ENDING).unlink()
    status: Status = "finished"
    reason = ""
    try:
        yield
        why = why_stopped()
        if why is not None:
            status, reason = "stopped", why
    except BaseException as error:
        status, reason = _of(error)
        raise
    finally:
        if is_ours():
            record(folder, status, reason, facts())


def record(
    folder: Path, status: Status, reason: str, facts: Mapping[str, Any] | None = None
) -> None:
    """Write how a run ended, if that can be written."""
    about = {"status": status, "reason": " ".join(reason.split()), "time": time.time()}
    about |= facts or {}
    with suppress(OSError):  # such as on a full disk, which may be why the run ends
        write_text(folder / ENDING, json.dumps(about, indent=2) + "\n")


def _of(error: BaseException) -> tuple[Status, str]:
    """How an error ends a run, and why."""
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


def summarise(run_dir: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a run, without what is known of one that has not finished too.

    ``wait_share`` is the share of training time spent waiting for data, and ``startup_seconds`` the
    wait of the first step, in which the input starts up; ``wait_share`` includes it, and
    ``steady_wait_share`` does not. Where a run was begun by a version that did not log the waits of
    steps, ``startup_seconds`` is None and nothing is taken off, and ``longest_wait_seconds`` is of
    the steps whose waits were logged, or None.

    Args:
        run_dir: Folder with the metrics of the whole run, including the parts before a resume.
        about: Facts that the metrics do not hold, added as they are.
    """
    metrics = metrics_of(run_dir)
    train, val = metrics.train, metrics.val
    seconds, waited = sum(column(train, "seconds")), sum(column(train, "wait_seconds"))
    waits = [wait for line in train for wait in step_waits(line)]
    startup = next(iter(step_waits(train[0])), None) if train else None
    steady, steady_seconds = waited - (startup or 0.0), seconds - (startup or 0.0)
    summary: dict[str, Any] = {
        **about,
        "step": metrics.lines[-1]["step"],
        "epoch": metrics.lines[-1]["epoch"],
        "train_seconds": round(seconds, 2),
        "images_per_second": round(images_in(train) / max(seconds, 1e-9), 1),
        "wait_share": round(waited / max(seconds, 1e-9), 4),
        "startup_seconds": startup,
        "steady_wait_share": round(max(0.0, steady) / max(steady_seconds, 1e-9), 4),
        "longest_wait_seconds": max(waits, default=None),
        "train_loss": train[-1].get("loss") if train else None,
    }
    if val:
        last = val[-1]
        summary |= {
            "top5": last.get("top5"),
            "val_loss": last.get("loss"),
            "evaluate_seconds": round(sum(column(val, "seconds")), 2),
        }
        if "ema_top1" in last:
            names = {"ema_top1": "ema_top1", "ema_top5": "ema_top5", "ema_val_loss": "ema_loss"}
            summary |= {name: last.get(of) for name, of in names.items()}
    summary["machine"] = {"processor": processor(), "python": platform.python_version()}
    summary["versions"] = versions()
    return summary


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write ``summary.json``."""
    write_text(run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")


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
