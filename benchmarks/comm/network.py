"""An emulated network on one machine: each node is a network namespace with one shaped link to a
switch, which is a bridge in a namespace of its own, so that the host's network is not touched.

Each link is shaped in both directions by token buckets (tc-tbf(8)) at its two ends. The only delay
is that of the queues. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

INTERFACE = "eth0"  # name of the link inside every node
_PREFIX = "largebatch-"
_STATE = Path("/run/largebatch-network")
_CLONE_NEWNET = 0x40000000
# Set the node's host name and /etc/hosts, then run a command: sh -c ... NAME HOSTS COMMAND
_BECOME_NODE = """
echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && shift && exec "$@"
"""
# The burst is what the link may send at once. It must hold a segment of the network stack, up to 64
# KiB, so that the shaper need not split it, and cover a millisecond, the shaper's own jitter.
_LEAST_BURST_BYTES = 68 * 1024
_BURST_SECONDS = 0.001
_QUEUE_SECONDS = 0.05


class NetworkError(RuntimeError):
    """Raised when the network cannot be created; the message is one line."""


@dataclass(frozen=True)
class LinkBytes:
    """Bytes over one node's link since its creation, including Ethernet headers."""

    sent: int
    received: int


def missing() -> str | None:
    """Return the reason why no network can be created here, in one line; None if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    packages = {
        "ip": "iproute2",
        "tc": "iproute2",
        "unshare": "util-linux",
        "setpriv": "util-linux",
    }
    for program, package in packages.items():
        if shutil.which(program) is None:
            return f"the program {program} is missing (package {package})"
    try:
        with Network(1, mbit=100) as network:
            _run(network.inside(0, ["true"]))
    except NetworkError as error:
        return str(error)
    return None


class Network:
    """Network namespaces with an address each, used as a context manager.

    Several networks can exist at once. Remains of a process that was killed before it could clean
    up are removed when the next network is created.
    """

    def __init__(self, nodes: int, mbit: float | None = None) -> None:
        if not 1 <= nodes <= 150:
            raise NetworkError(f"nodes: {nodes} is out of range; valid: 1 to 150")
        self.nodes = nodes
        #: Common prefix of the names of its namespaces.
        self.name = _PREFIX + secrets.token_hex(4)
        self._switch = f"{self.name}-switch"
        self._mbit = _checked(mbit)
        self._shaped = False
        self._lock: IO[str] | None = None

    def __enter__(self) -> Network:
        remove_leftovers()
        self._lock = _lock(self.name)
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _remove(self.name)
        if self._lock is not None:
            self._lock.close()

    def _make(self) -> None:
        # torch also looks up the names of IPv4-mapped IPv6 addresses.
        addresses = [
            (kind + self.address(n), n) for n in range(self.nodes) for kind in ("", "::ffff:")
        ]
        lines = [f"{address} node-{node}" for address, node in addresses]
        self._file("hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        _run(["ip", "netns", "add", self._switch])
        self._ip(self._switch, "link add switch type bridge", "link set switch up")
        for node in range(self.nodes):
            name = self.namespace(node)
            _run(["ip", "netns", "add", name])
            self._ip(
                self._switch,
                f"link add port{node} type veth peer name {INTERFACE} netns {name}",
                f"link set port{node} addrgenmode none",  # no IPv6, which would add traffic
                f"link set port{node} master switch up",
            )
            self._ip(
                name,
                f"link set {INTERFACE} addrgenmode none",
                f"address add {self.address(node)}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
                "link set lo up",
            )
        self.shape(self._mbit)

    def shape(self, mbit: float | None, node: int | None = None) -> None:
        """Set the rate of every link, or of one node's, each way; None removes the limit."""
        bytes_per_second = int((_checked(mbit) or 0) * 1e6 / 8)
        burst = max(_LEAST_BURST_BYTES, int(bytes_per_second * _BURST_SECONDS))
        limit = burst + int(bytes_per_second * _QUEUE_SECONDS)
        nodes = range(self.nodes) if node is None else [node]
        ends = [(self.namespace(node), INTERFACE) for node in nodes]
        ends += [(self._switch, f"port{node}") for node in nodes]
        for namespace, device in ends:
            queue = ["tc", "-n", namespace, "qdisc"]
            if mbit is not None:
                rate = ["rate", f"{8 * bytes_per_second}bit", "burst", f"{burst}b"]
                _run([*queue, "replace", "dev", device, "root", "tbf", *rate, "limit", f"{limit}b"])
            elif self._shaped:
                _run([*queue, "delete", "dev", device, "root"])
        self._shaped = mbit is not None

    def namespace(self, node: int) -> str:
        return f"{self.name}-{node}"

    def _file(self, kind: str) -> Path:
        return _STATE / f"{self.name}.{kind}"

    def address(self, node: int) -> str:
        """Return the address of a node. As text, which torchrun sorts, they are in node order."""
        return f"10.77.0.{101 + node}"

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs ``command`` on a node and leaves nothing behind.

        The command gets its own process-id namespace and host name. The kernel kills all of its
        processes when the command ends, or when the thread that started it ends for any reason.
        """
        kept = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.namespace(node)]
        kept += ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child", "--uts"]
        kept += ["sh", "-c", _BECOME_NODE, f"node-{node}", str(self._file("hosts"))]
        return [*kept, *command]

    def link_bytes(self) -> list[LinkBytes]:
        """Return the bytes that have crossed the link of each node."""
        counts = []
        for node in range(self.nodes):
            show = ["-j", "-s", "link", "show", "dev", INTERFACE]
            (link,) = json.loads(_run(["ip", "-n", self.namespace(node), *show]))
            counts.append(LinkBytes(*(link["stats64"][way]["bytes"] for way in ("tx", "rx"))))
        return counts

    def link_rates(self, seconds: float = 2.0) -> list[float]:
        """Measure the bytes per second of one TCP connection from each node to the next.

        All nodes send simultaneously for ``seconds``, of which the first quarter is not counted.
        Bytes are payload, without headers.
        """
        if self.nodes == 1:
            return []
        ends = [self._connection(node, (node + 1) % self.nodes) for node in range(self.nodes)]
        until = time.perf_counter() + seconds
        start = time.perf_counter() + seconds / 4
        with ThreadPoolExecutor(2 * self.nodes) as pool:
            received = [pool.submit(_receive, taker, start, until) for _, taker in ends]
            for sender, _ in ends:
                pool.submit(_send, sender, until)
            rates = [future.result() for future in received]
        return rates

    def _connection(self, sender: int, receiver: int) -> tuple[socket.socket, socket.socket]:
        listener = self._in_namespace(receiver, socket.socket)
        listener.bind((self.address(receiver), 0))
        listener.listen()
        client = self._in_namespace(sender, socket.socket)
        client.settimeout(10)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        listener.close()
        server.settimeout(10)
        return client, server

    def _in_namespace(self, node: int, make: Callable[[], socket.socket]) -> socket.socket:
        """Create a socket in a node's namespace: that of the thread that creates it."""

        def enter() -> socket.socket:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{self.namespace(node)}") as file:
                if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                    raise NetworkError(f"setns: {os.strerror(ctypes.get_errno())}")
            return make()

        with ThreadPoolExecutor(1) as thread:  # the change of namespace ends with the thread
            return thread.submit(enter).result()

    def wait_until_idle(self) -> None:
        """Wait until the last process on any node has ended; killed processes take a moment."""
        _wait_for_processes([self.namespace(node) for node in range(self.nodes)])

    def _ip(self, namespace: str, *commands: str) -> None:
        _run(["ip", "-n", namespace, "-batch", "-"], "\n".join(commands) + "\n")


def remove_leftovers() -> None:
    """Remove the networks of processes that have ended: those whose lock is not held."""
    for path in _STATE.glob("*.lock"):
        try:
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path.stem)
        except (BlockingIOError, FileNotFoundError):
            continue  # in use, or just removed


def namespaces() -> list[str]:
    """Return the namespaces of all emulated networks on this machine."""
    lines = _run(["ip", "netns", "list"]).splitlines()
    return [line.split()[0] for line in lines if line.startswith(_PREFIX)]


def _lock(name: str) -> IO[str]:
    _STATE.mkdir(exist_ok=True)
    new = _STATE / f"{name}.new"
    file = open(new, "w")  # stays open as long as the network exists  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    new.rename(_STATE / f"{name}.lock")  # visible to others only when locked
    return file


def _remove(name: str) -> None:
    mine = [n for n in namespaces() if n.startswith(f"{name}-")]
    _wait_for_processes(mine)  # a namespace lives until its last process has ended
    for namespace in mine:
        _run(["ip", "netns", "delete", namespace])
    for kind in ("hosts", "new", "lock"):
        (_STATE / f"{name}.{kind}").unlink(missing_ok=True)


def _wait_for_processes(namespaces: list[str]) -> None:
    deadline = time.monotonic() + 5
    for namespace in namespaces:
        while _run(["ip", "netns", "pids", namespace]) and time.monotonic() < deadline:
            time.sleep(0.02)


def _receive(taker: socket.socket, start: float, until: float) -> float:
    buffer = bytearray(1 << 20)
    first = last = 0.0
    count = 0
    with taker:
        while (now := time.perf_counter()) < until and (size := taker.recv_into(buffer)):
            if now < start:
                first = last = time.perf_counter()
                continue
            count += size
            last = time.perf_counter()
        while taker.recv_into(buffer):  # drain until the sender is done
            pass
    return count / (last - first)


def _send(sender: socket.socket, until: float) -> None:
    data = bytes(1 << 17)
    with sender:
        while time.perf_counter() < until:
            sender.sendall(data)


def _checked(mbit: float | None) -> float | None:
    if mbit is not None and not 1 <= mbit <= 30_000:
        raise NetworkError(f"mbit: {mbit} is out of range; valid: 1 to 30000")
    return mbit


def _run(command: list[str], given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode != 0:
        why = (done.stderr or done.stdout).strip().splitlines()
        raise NetworkError(f"{' '.join(command[:6])} failed: {why[0] if why else done.returncode}")
    return done.stdout
