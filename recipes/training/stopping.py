"""The end of a run before its last step: for a signal, for a callback, or because it stands still.

A run that stands still is ended if a rank no longer answers, and described if one is only late.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from ...comm import StallWatch, join_roll_call
from ..ranks import Job
from .callbacks import Callback, RunContext, Status
from .folder.ending import record
from .folder.lock import is_held_here
from .process import pass_to_torchrun

#: Steps between telling and knowing. One may be in work on the device, and one is queued behind it.
DELAY = 2
#: How long the end of the process waits for its record to be written.
_SECONDS_TO_RECORD = 5


class StepAgreement:
    """The largest of the numbers that ranks give at the end of a step, known two steps later."""

    # Every rank reads the number of the same step, so that all do the same after it. One number is
    # reduced at a time, asynchronously: no host waits for a step that it has just queued.

    def __init__(self, device: torch.device) -> None:
        slots = DELAY + 1
        self._numbers = torch.zeros(slots, dtype=torch.int32, device=device)
        self._work: list[Any] = [None] * slots  # of gloo, or the event of the copy to the host
        self._slot = 0
        self._stream: torch.cuda.Stream | None = None
        self._read = self._numbers
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._read = torch.zeros(slots, dtype=torch.int32, pin_memory=True)

    def tell(self, number: int) -> int:
        """Give this rank's number, at least 0, at the end of a step; a collective."""
        slot, oldest = self._slot, (self._slot + 1) % len(self._work)
        mine = self._numbers[slot : slot + 1].fill_(number)
        work: Any = dist.all_reduce(mine, dist.ReduceOp.MAX, async_op=True)
        if self._stream is not None:
            # On a stream of its own: the next forward pass need not wait for the other ranks.
            with torch.cuda.stream(self._stream):
                work.wait()
                self._read[slot : slot + 1].copy_(mine, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            work = event
        self._work[slot], self._slot = work, oldest
        return self._wait(oldest)

    def end(self) -> None:
        """Wait for what is under way."""
        for slot in range(len(self._work)):
            self._wait(slot)

    def _wait(self, slot: int) -> int:
        work, self._work[slot] = self._work[slot], None
        if work is None:
            return 0
        work.synchronize() if self._stream is not None else work.wait()
        return int(self._read[slot])


class Stopping:
    """Decides whether a run stops, the same on all ranks."""

    def __init__(self, job: Job, warn: Callable[[str], None]) -> None:
        self.received = 0  # number of the last signal that this rank has received; 0: none
        self.reason = ""  # why a callback of this rank asked to stop
        self.signal = 0  # number of the signal for which all ranks stop; 0: they do not
        self.by_callback = False  # whether all ranks stop as a callback asked for it
        self._agreement = StepAgreement(job.device) if job.world_size > 1 else None
        self._warn = warn

    def __bool__(self) -> bool:
        """Whether the run stops."""
        return bool(self.signal or self.by_callback)

    @property
    def asked(self) -> str | None:
        """Why all ranks stop as a callback asked for it, empty on the others; else None."""
        return self.reason if self.by_callback else None

    def note(self, number: int) -> None:
        """Note that this rank has received a signal, and say so at once."""
        is_first, self.received = not self.received, number
        if is_first:
            with suppress(RuntimeError):  # of a print() that the signal has interrupted
                self._warn(
                    f"{signal.Signals(number).name}: the run stops with a checkpoint; the same "
                    "signal once more ends it without one"
                )

    def ask(self, reason: str) -> None:
        """Note that a callback of this rank asks to stop."""
        self.reason = reason

    def after_step(self) -> None:
        """Decide at the end of a step; a collective, which waits for no other rank."""
        number = 1 + self.received if self.received else int(bool(self.reason))
        if self._agreement:
            number = self._agreement.tell(number)
        self.signal, self.by_callback = max(0, number - 1), number == 1

    def end(self) -> None:
        """Wait for what the ranks are still telling each other."""
        if self._agreement:
            self._agreement.end()


class Standstill(Callback):
    """Watches the steps of each rank of several; see :class:`largebatch.comm.StallWatch`."""

    all_ranks = True
    _watch: StallWatch | None = None

    def on_start(self, run: RunContext) -> None:
        if roll_call := join_roll_call():
            end = partial(_end, run_dir=run.run_dir if run.job.is_main else None)
            self._watch = StallWatch(roll_call, end)

    def on_step_begin(self, step: int) -> None:
        if self._watch:
            self._watch.begin(step + 1)

    def on_step_end(self, step: int) -> None:
        if self._watch:
            self._watch.finish()

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        if self._watch:
            self._watch.close()


def _end(line: str, run_dir: Path | None) -> None:
    """End the process: its main thread waits in a collective, and cannot be reached."""
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
    if is_held_here(run_dir):
        record(run_dir, "failed", line)
