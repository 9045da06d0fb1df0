"""A process that this one starts, with a pipe to it; neither a death nor a hang of it spreads."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_CONTEXT: Any = multiprocessing.get_context("spawn")


class Child:
    """A process that runs ``target(pipe, *arguments)``; what it prints goes to standard error."""

    def __init__(self, target: Callable[..., object], *arguments: Any) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_begin, args=(theirs, target, arguments))
        self._process.start()
        theirs.close()

    def tell(self, message: Any) -> None:
        """Send a message; a process that has died misses it, as :meth:`reply` then says."""
        with suppress(OSError):
            self.pipe.send(message)

    def reply(self, seconds: float) -> Any:
        """Return the next message."""
        if not self.pipe.poll(max(0.0, seconds)):
            raise TimeoutError(f"no reply within {seconds:.0f} s")
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(60)  # a busy machine may take long over an end
            raise ChildProcessError(f"ended {ended(self._process.exitcode)}") from None

    @property
    def died(self) -> bool:
        """Whether the process has ended by a signal or with an exit code other than 0."""
        return bool(self._process.exitcode)

    def end(self) -> None:
        """End the process with all that it started; a second call does nothing."""
        if self.pipe.closed:
            return
        self.pipe.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def _begin(pipe: Any, target: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    os.setsid()  # so that what it starts can be ended with it
    os.dup2(2, 1)
    target(pipe, *arguments)


def ended(code: int | None) -> str:
    """Return how a process ended, in words."""
    return f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"


def end_with_parent() -> None:
    """Let the kernel end this process with the one that started it, which may be killed."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of Linux
