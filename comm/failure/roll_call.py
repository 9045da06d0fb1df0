"""Name the missing ranks when a collective fails.

A back end's error names at best an address ("Connection closed by peer [10.0.0.7]:4242"), and a
rank that waits for a dead one may only time out. Therefore every rank runs a thread that waits for
a roll call in the job's store and answers it. As long as nothing fails, this costs one idle
connection per rank. When a collective fails, the ranks on which it failed call the roll: a rank
that does not answer has ended or hangs, while one that merely waits in a collective answers.

The store must be reachable by all ranks over the network: torch's TCPStore, which torchrun,
``env://`` and ``tcp://`` use. torchrun's store outlives the ranks. Otherwise rank 0 hosts it, and
no roll can be called once rank 0 has ended; the error message then says so.
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

#: Time allowed for an answer. It comes from a thread that has nothing else to do.
GRACE_SECONDS = 3.0

_FOREVER = timedelta(days=365)
_POLL_SECONDS = 0.02


class CollectiveError(RuntimeError):
    """Raised for a failed collective; the message names the rank and any missing ranks."""


@contextmanager
def missing_ranks_named() -> Iterator[None]:
    """Add the missing ranks to the error of a collective that fails inside this context.

    Every rank of the job must enter it after ``init_process_group``, and answers roll calls while
    inside. A rank that receives SIGTERM before its collective fails, which torchrun sends to the
    other ranks of a node, ends without a message unless it handles that signal.

    Raises:
        CollectiveError: a RuntimeError, such as that of a failed collective, occurred while ranks
            were missing.

    Example::

        dist.init_process_group("gloo")
        with missing_ranks_named():
            train()
    """
    _join()
    try:
        yield
    except RuntimeError as error:
        with _ignoring_sigterm():
            missing = describe_missing_ranks()
        if not missing or missing in str(error):
            raise
        raise CollectiveError(f"rank {dist.get_rank()}: {error}; {missing}") from error
    finally:
        _leave()


@contextmanager
def _ignoring_sigterm() -> Iterator[None]:
    """Ignore SIGTERM, which torchrun sends to all ranks of a node as soon as one has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def describe_missing_ranks() -> str:
    """Call the roll and describe the missing ranks; empty if there are none or no call is possible.

    Returns within about twice ``GRACE_SECONDS``. The first verdict that names ranks is final:
    ranks that fail later, because others ended after the first failure, report the same ranks.
    """
    caller = _join()
    if caller is None:
        return ""
    try:
        missing = caller.missing()
    except Exception:  # any error that the store raises when the process that hosts it has ended
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = "torchrun's agent on the first node" if agents else "rank 0"
        return f"{host} has ended: it hosts the job's store, which does not answer"
    if not missing:
        return ""
    noun = "ranks" if len(missing) > 1 else "rank"
    return f"{noun} {_listed(missing)} did not answer within {GRACE_SECONDS:g} s (ended or hanging)"


def join_roll_call() -> None:
    """Make this rank answer roll calls; every rank must call it."""
    _join()


_lock = threading.Lock()
_joined: tuple[Any, _RollCall] | None = None


def _join() -> _RollCall | None:
    global _joined
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    with _lock:
        if _joined is None or _joined[0] is not store:  # the store changes on re-initialization
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
    """One rank's side of the roll call: a thread that answers, and a method that calls.

    Calls are numbered. Each rank is woken by a key of its own, so that it can wake its own thread
    to end it. If several ranks call at the same time, one asks and the others wait for its verdict.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        # A waiting client blocks its connection, so answering needs a second one.
        self._store = dist.PrefixStore("largebatch/roll-call", store.clone())
        self._waiting = dist.PrefixStore("largebatch/roll-call", store.clone())
        self._number = 1  # of the next call
        self._known: list[int] = []  # missing ranks by the first verdict
        self._ended = False
        self._calling = threading.Lock()
        self._thread = threading.Thread(
            target=self._answer, name="largebatch-roll-call", daemon=True
        )
        self._thread.start()
        # A thread that returned from the store during interpreter shutdown would crash it.
        atexit.register(self.end)

    def missing(self) -> list[int]:
        """Return the ranks that do not answer."""
        with self._calling:
            if self._known:
                return self._known
            # If this rank has just answered a call for this failure, that was the previous number.
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
        if not self._store.check([key]):  # this rank asks first, or the one that asked has ended
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
                # Keep the verdict: the store may be gone when the failure reaches this rank.
                self._waiting.wait([f"{number}/verdict"], timedelta(seconds=3 * GRACE_SECONDS))
                self._known = self._known or _ranks(self._waiting.get(f"{number}/verdict"))
        except Exception:
            return  # the store has ended, and the job with it

    def end(self) -> None:
        """Stop answering."""
        if self._ended:
            return
        self._ended = True
        atexit.unregister(self.end)
        try:
            self._store.set(f"{self._number}/wake/{self._rank}", "")
        except Exception:
            return  # the store has ended
        self._thread.join(GRACE_SECONDS)


def _ranks(verdict: bytes) -> list[int]:
    return [int(rank) for rank in verdict.decode().split(",")] if verdict else []


def _listed(numbers: Sequence[int]) -> str:
    words = [str(number) for number in numbers]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
