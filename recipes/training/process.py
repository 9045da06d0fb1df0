"""The process of a run: the signals that stop it, output that nobody reads, errors on many ranks.

Imports nothing heavy: it is there before torch is loaded.
"""

from __future__ import annotations

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

from ..errors import LostRankError, RecipeError, exit_on_user_error, user_errors

#: SIGHUP comes when a terminal closes, SIGUSR1 from Slurm before the time limit, and SIGXCPU at a
#: limit of processor time. SIGQUIT is not among them: it ends a process that does not answer.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)

#: A signal to all processes of a job, as Slurm and systemd send it, reaches a rank twice: torchrun
#: passes its own on. So much later than the first, another one is a second request.
_SECONDS_TO_PASS_ON = 5.0
#: How long ranks that do not report an error wait for the one that does.
_SECONDS_TO_REPORT = 20


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
    """Handlers of the signals. Python runs them on the main thread, between two instructions."""

    def __init__(self) -> None:
        self.note: Callable[[int], None] | None = None
        self.has_trained = self._leaving = False
        self._process, self._first = os.getpid(), dict[int, float]()
        self._before = {
            number: signal.signal(number, self._handle) or signal.SIG_DFL
            for number in STOPPING
            if signal.getsignal(number) is not signal.SIG_IGN
        }

    def end(self) -> None:
        """Restore what was before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, is_first = time.monotonic(), number not in self._first
        since = now - self._first.setdefault(number, now)
        passed_on = _SECONDS_TO_PASS_ON if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
        # The kernel repeats SIGXCPU each second.
        is_second = not is_first and number != signal.SIGXCPU and since >= passed_on
        if is_second or os.getpid() != self._process:  # a forked child has the handlers too
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.note is not None:
            self.note(number)
        elif not self._leaving:
            self._leaving = True
            self._say(number)
            raise SystemExit(128 + number)

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


_handling: _Handling | None = None


# --- output that nobody reads ----------------------------------------------------------------


@contextmanager
def going_on() -> Iterator[None]:
    """Context manager at whose end output that nobody reads any more is dropped without an error.

    While a run trains, a line that cannot be written is left out by :class:`.console.Display`.
    """
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed before the start
            try:
                stream.flush()
            except OSError:  # as Python's documentation of SIGPIPE advises
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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
