"""The signals that stop a run: noted while it trains, and elsewhere the end of the process.

Python runs the handler of a signal on the main thread, between two instructions; one that waits in
a collective does not run it. But the interpreter also writes the number of each signal into a file
descriptor, at once (``signal.set_wakeup_fd``). A thread reads it here, and ends the process where
the main thread cannot, or when the same signal comes a second time.

Imports nothing heavy: it is there before torch is loaded.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

#: SIGHUP comes when a terminal closes, SIGUSR1 from Slurm before the time limit, and SIGXCPU at a
#: limit of processor time. SIGQUIT is not among them: it ends a process that does not answer.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)

#: A signal to all processes of a job, as Slurm and systemd send it, reaches a rank twice: torchrun
#: passes its own on. So much later than the first, another one is a second request.
_SECONDS_TO_PASS_ON = 5.0
#: How long the main thread may take to answer a signal that ends the process.
_SECONDS_TO_ANSWER = 3.0


@contextmanager
def ending_in_one_line() -> Iterator[None]:
    """Context manager of a run's process, in which a signal ends it in one line.

    That is what :data:`STOPPING` do outside of :func:`noted`: rank 0 prints the line, and
    SystemExit is raised on the main thread, with 128 + the number. If that thread does not answer
    within seconds, or the same signal comes again, the process ends by the signal. SIGXCPU does not
    count twice: the kernel repeats it each second. A signal that is ignored at the start, as SIGHUP
    under nohup, stays ignored.

    Does nothing inside of another one, and outside of the main thread.
    """
    global _handling
    if _handling is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _handling = handling = _Handling()
    try:
        yield
    finally:
        _handling = None
        handling.end()


@contextmanager
def noted(note: Callable[[int], None]) -> Iterator[None]:
    """Context manager of a training loop, in which a signal only calls ``note`` with its number.

    The same signal a second time ends the process at once. Under torchrun, it counts as a second
    one only if it comes 5 seconds after the first or later.
    """
    with ending_in_one_line():
        handling = _handling
        if handling is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        handling.note, before = note, handling.note
        try:
            yield
        finally:
            handling.note, handling.has_trained = before, True


class _Handling:
    """Handlers of the signals, and the thread that reads their numbers."""

    def __init__(self) -> None:
        self.note: Callable[[int], None] | None = None
        self.has_trained = False
        self._answered = threading.Event()  # the main thread has run a handler
        self._seen: set[int] = set()
        self._leaving = False
        self._before = {
            number: signal.signal(number, self._handle) or signal.SIG_DFL
            for number in STOPPING
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        threading.Thread(
            target=self._read, args=(reading,), name="largebatch-signals", daemon=True
        ).start()

    def end(self) -> None:
        """Restore what was before; the thread ends."""
        self.forget(self._wakeup)
        os.close(self._writing)

    def forget(self, wakeup: int) -> None:
        """Restore the handlers of before."""
        signal.set_wakeup_fd(wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = number not in self._seen
        self._seen.add(number)
        self._answered.set()
        if self.note is not None:
            self.note(number)
        elif is_first and not self._leaving:
            self._leaving = True
            self._say(number)
            raise SystemExit(128 + number)

    def _read(self, reading: int) -> None:
        first: dict[int, float] = {}
        passed_on = _SECONDS_TO_PASS_ON if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
        with open(reading, "rb", buffering=0) as numbers:
            while byte := numbers.read(1):
                if self._wakeup >= 0:
                    with suppress(OSError):
                        os.write(self._wakeup, byte)
                number, now = byte[0], time.monotonic()
                if number not in self._before:
                    continue
                if number not in first:
                    first[number] = now
                    if self.note is None:
                        self._await_answer(number)
                elif number != signal.SIGXCPU and now - first[number] >= passed_on:
                    _end_by(number)

    def _await_answer(self, number: int) -> None:
        """End the process by the signal if the main thread does not; meanwhile, read on."""

        def wait() -> None:
            if not self._answered.wait(_SECONDS_TO_ANSWER) and _handling is self:
                self._say(number)
                _end_by(number)

        threading.Thread(target=wait, name="largebatch-signal", daemon=True).start()

    def _say(self, number: int) -> None:
        if os.environ.get("RANK", "0") != "0":
            return
        name = signal.Signals(number).name
        where = "at start-up, before the first step"
        if self.has_trained:
            where = "after training; resume=true writes what is missing of its results"
        # Not by print(), which the signal may have interrupted.
        with suppress(OSError):
            os.write(2, f"largebatch: error: ended by {name} {where}\n".encode())


def _end_by(number: int) -> None:
    """End the process by the default action of a signal."""
    # Python lets only the main thread set a handler, and that one may be blocked.
    ctypes.CDLL(None).signal(number, None)  # None: SIG_DFL
    os.kill(os.getpid(), number)


_handling: _Handling | None = None


def _forget_in_child() -> None:
    """Restore the handlers in a forked process: its parent owns the pipe."""
    global _handling
    if _handling is not None:
        handling, _handling = _handling, None
        handling.forget(-1)


os.register_at_fork(after_in_child=_forget_in_child)
