"""Run a command while other sockets listen at ports, to show that its tests name none of them.

    python -m tests.take_ports 9 20000-29600 -- make test

Each must be free; they are let go when the command ends, whose exit status is passed on.
"""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from contextlib import ExitStack


def take(ports: list[int]) -> ExitStack:
    """Listen at ports of the loopback address until the result is closed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 2 * len(ports) + 256), most))
    taken = ExitStack()
    for port in ports:
        taken.enter_context(socket.create_server(("127.0.0.1", port)))
    return taken


def ranges(words: list[str]) -> list[int]:
    """Return the ports of words such as ``9`` and ``20000-29999``."""
    ends = [(word.split("-")[0], word.split("-")[-1]) for word in words]
    return [port for first, last in ends for port in range(int(first), int(last) + 1)]


if __name__ == "__main__":
    at = sys.argv.index("--")
    with take(ranges(sys.argv[1:at])):
        sys.exit(subprocess.run(sys.argv[at + 1 :], check=False).returncode)
