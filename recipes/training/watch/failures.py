"""A run that stands still: ended if a rank no longer answers, described if one is only late."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from ....comm import StallWatch, join_roll_call
from ...ranks import Job
from ..callbacks import Callback, RunContext, Status
from ..folder.ending import record
from ..folder.lock import LOCK, this_process
from ..process import pass_to_torchrun

#: How long the end of the process waits for its record to be written.
_SECONDS_TO_RECORD = 5


class Standstill(Callback):
    """Watches the steps of each rank; see :class:`largebatch.comm.StallWatch`."""

    all_ranks = True

    def __init__(self) -> None:
        self._watch: StallWatch | None = None

    def on_start(self, run: RunContext) -> None:
        roll_call = join_roll_call()
        folder = run.run_dir if run.job.is_main else None
        end = partial(_end, run_dir=folder)
        self._watch = StallWatch(roll_call, end) if roll_call else None

    def on_step_begin(self, step: int) -> None:
        if self._watch:
            self._watch.begin(step + 1)

    def on_step_end(self, step: int) -> None:
        if self._watch:
            self._watch.finish()

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        if self._watch:
            self._watch.close()


def watches_of(job: Job) -> list[tuple[str, Callback]]:
    """Return the callback with its name; none for a single rank."""
    return [("standstill", Standstill())] if job.world_size > 1 else []


def _end(line: str, run_dir: Path | None) -> None:
    """End the process: its main thread waits in a collective, and cannot be reached.

    Args:
        line: Why.
        run_dir: The run's folder, to record it in; None on ranks that do not write there.
    """
    try:
        with suppress(OSError):  # such as a standard error that is closed
            print(f"largebatch: error: {line}", file=sys.stderr, flush=True)
        pass_to_torchrun(line)
        if run_dir is not None:
            # In a thread, as the file system may be what stands still.
            writes = Thread(target=_record, args=(run_dir, line), daemon=True)
            writes.start()
            writes.join(_SECONDS_TO_RECORD)
    finally:
        os._exit(1)


def _record(run_dir: Path, line: str) -> None:
    """Write how the run ended, unless another run has taken the folder over."""
    with suppress(OSError, ValueError):
        lock = json.loads((run_dir / LOCK).read_text())
        if all(lock.get(name) == value for name, value in this_process().items()):
            record(run_dir, "failed", line)
