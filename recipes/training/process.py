"""The process of a run: the signals that stop it, output that nobody reads, errors on many ranks.

Python runs the handler of a signal on the main thread, between two instructions; one that waits in
a collective does not run it. But the interpreter also writes the number of each signal into a file
descriptor, at once (``signal.set_wakeup_fd``). A thread reads it here, and ends the process where
the main thread cannot, or when the same signal comes a second time.

Imports nothing heavy: it is there before torch is loaded.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import LostRankError, RecipeError, exit_on_user_error, user_errors

#: SIGHUP comes when a terminal closes, SIGUSR1 from Slurm before the time limit, and SIGXCPU at a
#: limit of processor time. SIGQUIT is not among them: it ends a process that does not answer.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)

#: A signal to all processes of a job, as Slurm and systemd send it, reaches a rank twice: torchrun
#: passes its own on. So much later than the first, another one is a second request.
_SECONDS_TO_PASS_ON = 5.0
#: How long the main thread may take to answer a signal that ends the process.
_SECONDS_TO_ANSWER = 3.0
#: How long ranks that do not report an error wait for the one that does.
_SECONDS_TO_REPORT = 20
#: Errors of a write to a pipe that is closed, and to a terminal that is gone.
_CLOSED = (errno.EPIPE, errno.EIO)


def age_seconds() -> float:
    """Seconds since this process started; 0 where that cannot be seen."""
    with suppress(OSError, IndexError, ValueError):
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        # In ticks since the start of the machine.
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        return max(0.0, since_boot - int(started) / os.sysconf("SC_CLK_TCK"))
    return 0.0


# --- signals ---------------------------------------------------------------------------------


@contextmanager
def ending_in_one_line() -> Iterator[None]:
    """Context manager of a run's process, in which a signal ends it in one line."""
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
    """Context manager of a training loop, in which a signal only calls ``note`` with its number."""
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
        threading.Thread(target=self._read, args=(reading,), daemon=True).start()

    def end(self, *, forked: bool = False) -> None:
        """Restore what was before; the thread ends, but for a forked process, which has none."""
        signal.set_wakeup_fd(-1 if forked else self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if not forked:  # whose parent owns the pipe
            os.close(self._writing)

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
                        wait = threading.Thread(target=self._await, args=(number,), daemon=True)
                        wait.start()
                # The kernel repeats SIGXCPU each second.
                elif number != signal.SIGXCPU and now - first[number] >= passed_on:
                    _end_by(number)

    def _await(self, number: int) -> None:
        """End the process by the signal if the main thread does not."""
        if not self._answered.wait(_SECONDS_TO_ANSWER) and _handling is self:
            self._say(number)
            _end_by(number)

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
    global _handling
    if _handling is not None:
        handling, _handling = _handling, None
        handling.end(forked=True)


os.register_at_fork(after_in_child=_forget_in_child)


# --- output that nobody reads ----------------------------------------------------------------


@contextmanager
def going_on() -> Iterator[None]:
    """Context manager in which a closed standard output, or standard error, ends nothing."""
    before = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _lasting(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _lasting(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: Any) -> io.TextIOWrapper:
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Lasting(io.FileIO):
    """A file descriptor that becomes that of the null device once nobody reads it."""

    # So output of libraries in C, and of child processes, goes there too.

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


# --- errors ----------------------------------------------------------------------------------


@contextmanager
def reported_once(reports: Callable[[Exception], bool]) -> Iterator[None]:
    """Exit with one line for an error that the user can fix, which one rank prints."""
    # torchrun ends all processes of a machine once one has ended. So the ranks that do not report
    # wait for that, and one that is still there afterwards reports the error itself.
    has_waited = False
    with exit_on_user_error(lambda error: has_waited or reports(error)):
        try:
            yield
        except Exception as error:
            is_for_user = isinstance(error, user_errors())
            others = is_for_user and not reports(error) and not isinstance(error, LostRankError)
            if others and "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(_SECONDS_TO_REPORT)
                has_waited = True
            if not is_for_user or has_waited or reports(error):
                kind = "" if isinstance(error, RecipeError) else f"{type(error).__name__}: "
                pass_to_torchrun(f"{kind}{error}")
            raise


def pass_to_torchrun(message: str) -> None:
    """Write the file from which torchrun reads the error of a process."""
    # In the form of torch.distributed.elastic.multiprocessing.errors.ErrorHandler.
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(path, "w") as file:  # such as on a full disk
            json.dump({"message": about}, file)
