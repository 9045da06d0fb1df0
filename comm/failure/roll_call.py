"""Name the ranks that are gone when a collective fails.

A back end's error names at best an address ("Connection closed by peer [10.0.0.7]:4242"), and a
rank that waits for one that died may only time out. So every rank keeps a thread that waits, in
the store of the job, for a roll call, and answers it. While nothing fails, that is one connection
per rank on which nothing is sent. When a collective fails, the ranks it failed on call the roll,
and who does not answer has ended or hangs. A rank that merely waits in a collective answers.

Needs a store that all ranks reach over the network: torch's TCPStore, which torchrun,
``env://`` and ``tcp://`` use. torchrun's outlives the ranks; otherwise rank 0 holds it, and no
roll can be called once rank 0 is gone, which is then what the message says.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

#: How long an answer may take: it comes from a thread that has nothing else to do.
GRACE_SECONDS = 3.0

_FOREVER = timedelta(days=365)
_POLL_SECONDS = 0.02


class CollectiveError(RuntimeError):
    """A collective failed; the message names the rank, and those that are missing, if any."""


@contextmanager
def missing_ranks_named() -> Iterator[None]:
    """Have what fails inside for want of a rank say which.

    Every rank of the job must enter it, after ``init_process_group``, and answers while it is
    inside. A rank that got SIGTERM before its collective failed, as torchrun sends it to the other
    ranks of the node, ends without a word unless it handles that signal.

    Raises:
        CollectiveError: a RuntimeError, as a failed collective is, while ranks were missing.

    Example::

        dist.init_process_group("gloo")
        with missing_ranks_named():
            train()
    """
    _join()
    try:
        yield
    except RuntimeError as error:
        with _not_terminated():
            told = verdict()
        if not told or told in str(error):
            raise
        raise CollectiveError(f"rank {dist.get_rank()}: {error}; {told}") from error
    finally:
        _leave()


@contextmanager
def _not_terminated() -> Iterator[None]:
    """Ignore SIGTERM: torchrun sends it to the ranks of a node as soon as one has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def verdict() -> str:
    """Call the roll: which ranks are missing, in words; empty if none, or where it cannot be.

    Returns within about twice ``GRACE_SECONDS``. The first verdict that names ranks stays: those
    that fail later, because others ended for it, tell the same.
    """
    caller = _join()
    if caller is None:
        return ""
    try:
        missing = caller.missing()
    except Exception:  # whatever the store raises when the process that holds it has ended
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder = "torchrun's agent on the first node" if agents else "rank 0"
        return f"{holder} has ended: the job's store, which it holds, does not answer"
    if not missing:
        return ""
    many = "ranks" if len(missing) > 1 else "rank"
    return f"{many} {_listed(missing)} did not answer within {GRACE_SECONDS:g} s: ended, or hang"


def join() -> None:
    """Have this rank answer when the roll is called; every rank must call it."""
    _join()


_lock = threading.Lock()
_joined: tuple[Any, _RollCall] | None = None


def _join() -> _RollCall | None:
    global _joined
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    with _lock:
        if _joined is None or _joined[0] is not store:  # another one after a new initialisation
            below = store
            while isinstance(below, dist.PrefixStore):
                below = below.underlying_store
            if not isinstance(below, dist.TCPStore):
                return None
            _joined = store, _RollCall(store, dist.get_rank(), dist.get_world_size())
        return _joined[1]


def _leave() -> None:
    global _joined
    with _lock:
        if _joined is not None:
            _joined[1].end()
        _joined = None


class _RollCall:
    """One rank's part: a thread that answers, and the means to call.

    Calls are numbered, and each rank is woken by a key of its own, so that it can wake itself to
    end. Of those who call at the same time one asks, the others wait for its verdict.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        # A wait holds a client's connection.
        self._store = dist.PrefixStore("largebatch/roll-call", store.clone())
        self._waiting = dist.PrefixStore("largebatch/roll-call", store.clone())
        self._number = 1  # of the call to come
        self._known: list[int] = []  # who is missing
        self._ended = False
        self._calling = threading.Lock()
        self._thread = threading.Thread(
            target=self._answer, name="largebatch-roll-call", daemon=True
        )
        self._thread.start()
        # A thread that came back from the store while the interpreter ends would crash it.
        atexit.register(self.end)

    def missing(self) -> list[int]:
        """The ranks that do not answer."""
        with self._calling:
            if self._known:
                return self._known
            # The last call may be what woke this rank a moment ago.
            current = self._number
            for number in {max(1, current - 1), current}:
                missing = self._verdict(number)
                if missing:
                    return missing
            return []

    def _verdict(self, number: int) -> list[int]:
        key = f"{number}/verdict"
        if self._store.add(f"{number}/callers", 1) > 1:
            end = time.monotonic() + 1.5 * GRACE_SECONDS
            while not self._store.check([key]) and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
        if not self._store.check([key]):  # it is for this rank to ask, or who did has ended too
            for rank in range(self._world_size):
                self._store.set(f"{number}/wake/{rank}", "")
            absent = set(range(self._world_size)) - {self._rank}
            end = time.monotonic() + GRACE_SECONDS
            while absent and time.monotonic() < end:
                absent -= {r for r in absent if self._store.check([f"{number}/here/{r}"])}
                time.sleep(_POLL_SECONDS)
            self._store.set(key, ",".join(map(str, sorted(absent))))
        return _ranks(self._store.get(key))

    def _answer(self) -> None:
        try:
            while True:
                self._waiting.wait([f"{self._number}/wake/{self._rank}"], _FOREVER)
                if self._ended:
                    return
                number = self._number
                self._waiting.set(f"{number}/here/{self._rank}", "")
                self._number += 1
                # Kept: by the time that the failure comes here, the store may be gone.
                self._waiting.wait([f"{number}/verdict"], timedelta(seconds=3 * GRACE_SECONDS))
                self._known = self._known or _ranks(self._waiting.get(f"{number}/verdict"))
        except Exception:
            return  # the store has ended, and with it the job

    def end(self) -> None:
        """Answer no more."""
        if self._ended:
            return
        self._ended = True
        atexit.unregister(self.end)
        try:
            self._store.set(f"{self._number}/wake/{self._rank}", "")
        except Exception:
            return  # as above
        self._thread.join(GRACE_SECONDS)


def _ranks(told: bytes) -> list[int]:
    return [int(rank) for rank in told.decode().split(",")] if told else []


def _listed(numbers: Sequence[int]) -> str:
    words = [str(number) for number in numbers]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
