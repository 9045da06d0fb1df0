"""A run that stands still: ended if a rank no longer answers, described if one is only late."""

from __future__ import annotations

import os
import sys
from typing import Any

from ...comm import StallWatch, join_roll_call
from ..ranks import Job
from .callbacks import Callback, RunContext, Status
from .failure_report import pass_to_torchrun


class Standstill(Callback):
    """Watches the steps of each rank; see :class:`largebatch.comm.StallWatch`."""

    all_ranks = True

    def __init__(self) -> None:
        self._watch: StallWatch | None = None

    def on_start(self, run: RunContext) -> None:
        roll_call = join_roll_call()
        self._watch = StallWatch(roll_call, _end) if roll_call else None

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


def _end(line: str) -> None:
    """End the process: its main thread waits in a collective, and cannot be reached."""
    print(f"largebatch: error: {line}", file=sys.stderr, flush=True)
    pass_to_torchrun(line)
    os._exit(1)
