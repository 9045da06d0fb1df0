"""Tell a thread about SIGTERM, since the main thread may be blocked in a collective.

Python runs a signal's handler on the main thread, between two instructions. A rank whose main
thread waits in a collective for one that has ended therefore does not run its handler. But the
interpreter also writes the number of a signal into a file descriptor, at once and on any thread
(``signal.set_wakeup_fd``); here a thread reads it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def on_sigterm(note: Callable[[], bool]) -> Iterator[None]:
    """Call ``note`` on a thread when SIGTERM comes; the process then ends if it returns True."""
    # A handler in Python still runs on the main thread, and decides instead.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _writing
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    outer, _writing = _writing, writing
    former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _stand_in)
    thread = threading.Thread(
        target=_read, args=(reading, former, note), name="largebatch-sigterm", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        _restore(former)
        _writing = outer
        os.close(writing)  # which ends the thread


_writing: int | None = None  # the end of the pipe that the interpreter writes to


def _stand_in(number: int, frame: FrameType | None) -> None:
    """Take the place of the default handler, which hides the signal from the interpreter."""


def _restore(wakeup: int) -> None:
    signal.set_wakeup_fd(wakeup)
    if signal.getsignal(signal.SIGTERM) is _stand_in:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _read(reading: int, former: int, note: Callable[[], bool]) -> None:
    with open(reading, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if former >= 0:
                with suppress(OSError):
                    os.write(former, number)
            if number[0] != signal.SIGTERM:
                continue
            # A handler that has been told of the signal may be gone when ``note`` returns, as that
            # of a training loop which has stopped for it: the process then ends in its own way.
            ends = signal.getsignal(signal.SIGTERM) is _stand_in
            with suppress(Exception):  # such as a standard error that is closed: the signal counts
                ends = note() and ends
            if ends and signal.getsignal(signal.SIGTERM) is _stand_in:
                # Python lets only the main thread set a handler, and that one may be blocked.
                ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # None: SIG_DFL
                os.kill(os.getpid(), signal.SIGTERM)


def _forget_in_child() -> None:
    """Undo it in a forked process, such as a data loader's worker: its parent owns the pipe."""
    global _writing
    if _writing is None:
        return
    _writing = None
    _restore(-1)


os.register_at_fork(after_in_child=_forget_in_child)
