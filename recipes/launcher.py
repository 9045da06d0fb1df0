"""The process that started this one, such as torchrun.

Imports nothing heavy: it is to be known before torch is loaded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LAUNCHER = os.getppid()  # as it is when this is imported, which is before torch is


def is_first_of_machine(error: Exception | None = None) -> bool:
    """Whether this process is the first of its machine, which reads and reports for all of them."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def ending_with_launcher() -> Iterator[None]:
    """Context manager in which this process ends when the one that started it has ended."""
    # A rank that joins its job waits for the others in C, where it sees nothing of that.
    joined = threading.Event()

    def watch() -> None:
        while not joined.wait(1.0):
            if os.getppid() != _LAUNCHER:
                with suppress(OSError):
                    os.write(2, b"largebatch: error: torchrun ended before all ranks had joined\n")
                os._exit(1)

    threading.Thread(target=watch, name="largebatch-launcher", daemon=True).start()
    try:
        yield
    finally:
        joined.set()
