"""An emulated cluster on one machine: torchrun starts several ranks on each node of a network.

    python -m benchmarks.comm.cluster --nodes 2 --ranks-per-node 4 --mbit 200 -- -m some.module args

Nodes are network namespaces (network.py): as on separate machines, ranks on the same node
communicate inside the node, and ranks on different nodes over shaped links. Processors and memory
are shared. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from benchmarks.comm.network import INTERFACE, LinkBytes, Network, NetworkError, missing

_STOPPING = (signal.SIGTERM, signal.SIGHUP)


class ClusterError(RuntimeError):
    """Raised when a job on the cluster fails."""


class Cluster:
    """A cluster of ``nodes`` × ``ranks_per_node`` ranks, used as a context manager.

    It leaves no process and no namespace behind, even after an exception, SIGINT, SIGTERM or
    SIGHUP (the last two raise SystemExit in the main thread). After SIGKILL its processes end, and
    its namespaces are removed when the next cluster is created. Each node's link carries ``mbit``
    megabits (10^6) per second in each direction.

    Example::

        with Cluster(nodes=4, ranks_per_node=2, mbit=200) as cluster:
            outputs = cluster.run(["-m", "some.module", "--an", "argument"])
    """

    def __init__(self, nodes: int, ranks_per_node: int, mbit: float | None = None) -> None:
        if ranks_per_node < 1:
            raise NetworkError(
                f"ranks_per_node: {ranks_per_node} is out of range; valid: 1 or more"
            )
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.network = Network(nodes, mbit)
        self._jobs: list[subprocess.Popen[bytes]] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> Cluster:
        if threading.current_thread() is threading.main_thread():
            # Keep a program's own handlers; the default action would skip the clean-up.
            for number in _STOPPING:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, _stop)
        try:
            self.network.__enter__()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with _signals_deferred():
            self._kill()
            self.network.__exit__()
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def run(
        self,
        arguments: Sequence[str],
        *,
        timeout_seconds: float = 600.0,
        grace_seconds: float = 10.0,
        environment: Mapping[str, str] | None = None,
        torchrun: Sequence[str] = (),
        echo: TextIO | None = None,
    ) -> list[str]:
        """Run a script by torchrun on all ranks, and return what the ranks of each node wrote."""
        variables = {**os.environ, **self._variables(), **(environment or {})}
        with tempfile.TemporaryDirectory(prefix="largebatch-cluster-") as folder:
            paths = [Path(folder) / f"node-{node}" for node in range(self.nodes)]
            name = Path(folder).name
            tails = [_Tail(node, path, echo) for node, path in enumerate(paths)]
            try:
                with _signals_deferred():
                    for node, path in enumerate(paths):
                        command = self._command(node, name, [*torchrun, *arguments])
                        self._jobs.append(_start(command, path, variables))
                failure = self._wait(timeout_seconds, grace_seconds, tails)
            finally:
                with _signals_deferred():
                    self._kill()
            for tail in tails:
                tail.read(last=True)
            outputs = [path.read_text(errors="replace") for path in paths]
        if failure is not None:
            node, what = failure
            lines = outputs[node].rstrip().splitlines()[-40:]
            raise ClusterError("\n".join([what, *lines]))
        return outputs

    def shape(self, mbit: float | None) -> None:
        """Set the rate of every link, None for no limit; not while a job is running."""
        self.network.shape(mbit)

    def link_bytes(self) -> list[LinkBytes]:
        """Return the bytes that each node has sent and received over its link so far."""
        return self.network.link_bytes()

    def link_rates(self, seconds: float = 2.0) -> list[float]:
        """Measure the bytes per second of TCP over each node's link, with all links in use."""
        return self.network.link_rates(seconds)

    def _variables(self) -> dict[str, str]:
        return {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",  # ranks share the processors
            "PYTHONUNBUFFERED": "1",
        }

    def _command(self, node: int, name: str, arguments: Sequence[str]) -> list[str]:
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", str(self.nodes), "--nproc-per-node", str(self.ranks_per_node)]
        command += ["--rdzv-backend", "c10d", "--rdzv-id", name]
        command += ["--rdzv-endpoint", f"{self.network.address(0)}:29400"]
        command += ["--local-addr", self.network.address(node)]
        return self.network.inside(node, [*command, *arguments])

    def _wait(
        self, timeout_seconds: float, grace_seconds: float, tails: list[_Tail]
    ) -> tuple[int, str] | None:
        """Wait for all nodes; return the first that failed and how, None if all succeeded."""
        deadline = time.monotonic() + timeout_seconds
        failure = None
        while True:
            for tail in tails:
                tail.read()
            codes = [job.poll() for job in self._jobs]
            if failure is None:
                failed = [node for node, code in enumerate(codes) if code not in (None, 0)]
                if failed:
                    failure = failed[0], f"node {failed[0]} ended with exit code {codes[failed[0]]}"
                    # The other nodes may print more when they notice the failure.
                    deadline = min(deadline, time.monotonic() + grace_seconds)
            if None not in codes:
                return failure
            if time.monotonic() > deadline:
                node = codes.index(None)
                return failure or (node, f"node {node} had not ended in {timeout_seconds:g} s")
            time.sleep(0.05)

    def _kill(self) -> None:
        """Kill the running jobs; all processes of a node end with its first one."""
        for job in self._jobs:
            job.kill()
        for job in self._jobs:
            job.wait()
        if self._jobs:
            self.network.wait_until_idle()
        self._jobs.clear()


def _start(command: list[str], output: Path, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    with open(output, "wb") as file:
        # In a session of its own, so that Ctrl-C at a terminal reaches this process alone.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )


class _Tail:
    """Copies new lines of a node's output to ``echo``."""

    def __init__(self, node: int, path: Path, echo: TextIO | None) -> None:
        self._node, self._path, self._echo = node, path, echo
        self._offset = 0

    def read(self, last: bool = False) -> None:
        if self._echo is None or not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            new = file.read()
        end = len(new) if last else new.rfind(b"\n") + 1
        self._offset += end
        for line in new[:end].decode(errors="replace").splitlines():
            print(f"[node {self._node}] {line}", file=self._echo, flush=True)


def _stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer signals during a start or a clean-up, which must not stop half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run only in the main thread
        return
    held: list[int] = []
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, *_STOPPING)}
    for number in before:
        signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        for held_back, handler in before.items():
            signal.signal(held_back, handler)
        for arrived in held:
            signal.raise_signal(arrived)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--mbit", type=float, help="rate of each link (default: no limit)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds (default: 600)")
    parser.add_argument("script", nargs="+", help="after --: a file, or -m and a module; arguments")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(_fail(f"cannot create a cluster: {reason}"))
    try:
        with Cluster(options.nodes, options.ranks_per_node, options.mbit) as cluster:
            cluster.run(options.script, timeout_seconds=options.timeout, echo=sys.stdout)
            for node, link in enumerate(cluster.link_bytes()):
                megabytes = f"sent {link.sent / 1e6:.1f} MB, received {link.received / 1e6:.1f} MB"
                print(f"node {node}: {megabytes}", file=sys.stderr)
    except NetworkError as error:
        sys.exit(_fail(str(error)))
    except ClusterError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
