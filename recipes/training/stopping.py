"""Stop a run before its end: for a signal, or because a callback asks for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..ranks import Job

#: Steps between telling and knowing. One may be in work on the device, and one is queued behind it.
DELAY = 2


class StepAgreement:
    """The largest of the numbers that ranks give at the end of a step, known two steps later.

    Every rank reads the number of the same step, so that all do the same after it; a look into the
    job's store might tell one rank a step before another. One number is reduced at a time on the
    default process group, asynchronously: no host waits for a step that it has just queued.

    Args:
        device: The device of this rank.
    """

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
        """Give this rank's number at the end of a step; a collective.

        Args:
            number: At least 0.

        Returns:
            The largest number of all ranks at the end of the step before the last; 0 at first.
        """
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
    """Decides whether a run stops, the same on all ranks.

    A rank alone stops after the step in which a signal or a wish came, several ranks two steps
    later.

    Args:
        job: The ranks.
        warn: Shows a warning on rank 0.

    Attributes:
        received: Number of the last signal that this rank has received; 0: none.
        reason: Why a callback of this rank asked to stop.
        signal: Number of the signal for which all ranks stop; 0: they do not.
        by_callback: Whether all ranks stop as a callback asked for it.
    """

    def __init__(self, job: Job, warn: Callable[[str], None]) -> None:
        self.received, self.reason = 0, ""
        self.signal, self.by_callback = 0, False
        self._agreement = StepAgreement(job.device) if job.world_size > 1 else None
        self._warn, self._has_warned = warn, False

    def __bool__(self) -> bool:
        """Whether the run stops."""
        return bool(self.signal or self.by_callback)

    @property
    def drops_steps(self) -> bool:
        """Whether a step that has begun may be dropped: not where others make it."""
        return self._agreement is None

    def note(self, number: int) -> None:
        """Note that this rank has received a signal."""
        self.received = number

    def ask(self, reason: str) -> None:
        """Note that a callback of this rank asks to stop."""
        self.reason = reason

    def in_step(self) -> bool:
        """Say at once that a signal has come; whether to drop the step that is being made."""
        if self.received and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{signal.Signals(self.received).name}: the run stops with a checkpoint; the same "
                "signal once more ends it without one"
            )
        if self.received and self.drops_steps:
            self.signal = self.received
        return bool(self.signal)

    def after_step(self) -> None:
        """Decide at the end of a step; a collective, which waits for no other rank."""
        self.in_step()
        number = 1 + self.received if self.received else int(bool(self.reason))
        if self._agreement:
            number = self._agreement.tell(number)
        self.signal, self.by_callback = max(0, number - 1), number == 1

    def end(self) -> None:
        """Wait for what the ranks are still telling each other."""
        if self._agreement:
            self._agreement.end()
