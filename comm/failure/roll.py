"""A rank's signs of life in the job's store, and the roll call: which ranks give none.

Each rank writes a beat once a second, as often as torch's own watch over NCCL asks the store. It
comes from a thread that has nothing else to do: a rank that computes, reads or waits in a
collective beats, and one that has ended, is suspended or is cut off does not. So a rank that calls
the roll only reads, and needs no answer to a question.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

import torch.distributed as dist

BEAT_SECONDS = 1.0
#: Time without a beat after which a rank is missing.
GRACE_SECONDS = 3.0

_POLL_SECONDS = 0.1
#: Time for which the rank that hosts the store keeps it for ranks that have not left yet.
_LEAVING_SECONDS = 2.0

#: States of a rank, as its beats have them.
_IN, _TERMINATED, LEFT, _FAILED = "in", "terminated", "left", "failed"


class Roll(NamedTuple):
    """The missing ranks, and what the main threads of the others do; empty if known before."""

    missing: list[int]
    places: dict[int, str]


class RollCall:
    """One rank's side of the roll call: a thread that beats, and a method that calls."""

    def __init__(self, store: Any, rank: int, world_size: int, *, is_host: bool = False) -> None:
        self.rank, self._world_size, self._is_host = rank, world_size, is_host
        self.has_ended = self.is_naming = False
        # A call may hang where the store cannot be reached: it has a connection of its own.
        self._beats, self._asking = (
            dist.PrefixStore("largebatch/roll-call", store.clone()) for _ in range(2)
        )
        # Kept for calls: the process that hosts the store ends it with the last reference.
        self.store: Any | None = store
        self._state, self.known, self._number = _IN, list[int](), 0
        # There may be one of another attempt with the same store.
        self._earlier = self._beats.compare_set("verdict", "", "").decode()
        self._wake = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._go_on, name="largebatch-beats", daemon=True)
        self._thread.start()
        # A thread that returned from the store during interpreter shutdown would crash it.
        atexit.register(self.end)

    def call(
        self,
        *,
        grace_seconds: float = GRACE_SECONDS,
        is_terminated: bool = False,
        is_inquiry: bool = False,
    ) -> Roll | None:
        """Find ranks without a beat for ``grace_seconds``; None if the store does not answer."""
        # The first ranks that any rank finds missing are final, so that ranks that end because of
        # them are not named. After SIGTERM, or where nothing has failed yet (an inquiry), ranks
        # that have received SIGTERM, have left or have not come yet are not missing.
        if is_terminated and not self.has_ended:
            self._state = _TERMINATED
            self._wake.set()
        rolls: list[Roll] = []

        def call() -> None:
            with suppress(Exception):  # whatever the store raises when its host has ended
                rolls.append(self._call(grace_seconds, is_terminated or is_inquiry))

        # The store does not return if the network to its host is gone.
        thread = threading.Thread(target=call, name="largebatch-calls-the-roll", daemon=True)
        thread.start()
        # Polls are counted, as time for which this rank is suspended is no answer of the store's.
        for _ in range(round(4 * grace_seconds / _POLL_SECONDS)):
            thread.join(_POLL_SECONDS)
            if not thread.is_alive():
                break
        return rolls[0] if rolls else Roll(self.known, {}) if self.known else None

    def is_first(self, what: str) -> bool:
        """Whether no rank has asked this about ``what`` before."""
        return bool(self._asking.add(f"first/{what}", 1) == 1)

    def _call(self, grace_seconds: float, only_in: bool) -> Roll:
        before = self._read(range(self._world_size))
        absent = set(range(self._world_size)) - {self.rank}
        places = {self.rank: _place()}
        for _ in range(1 + round(grace_seconds / _POLL_SECONDS)):
            self._agree(self._asking)
            if self.known:
                return Roll(self.known, {})
            for rank, (state, number, place) in self._read(absent).items():
                if number != before[rank][1]:
                    places[rank] = place
                if rank in places or (only_in and state not in (_IN, _FAILED)):
                    absent.remove(rank)
            if not absent:
                return Roll([], places)
            time.sleep(_POLL_SECONDS)
        self._agree(self._asking, absent)
        if self._is_host:  # the other ranks hear of it, though the store may end with this one
            time.sleep(1.5 * BEAT_SECONDS)
        return Roll(self.known, places)

    def _read(self, ranks: Iterable[int]) -> dict[int, list[str]]:
        """Return state, number and place of each rank's last beat; empty if it has not come."""
        keys = here = [str(rank) for rank in ranks]
        if not self._asking.check(keys):
            here = [key for key in keys if self._asking.check([key])]
        found = self._asking.multi_get(here) if here else ()
        beats = dict.fromkeys(keys, b"  ") | dict(zip(here, found, strict=True))
        return {int(key): beat.decode().split(" ", 2) for key, beat in beats.items()}

    def _agree(self, store: Any, missing: Iterable[int] = ()) -> None:
        """Note the first verdict of any rank, which is ``missing`` if there is none yet."""
        ranks = " ".join(map(str, sorted(missing)))
        ours = f"{uuid4().hex} {ranks}" if ranks else self._earlier
        verdict = store.compare_set("verdict", self._earlier, ours).decode()
        if verdict != self._earlier:
            self.known = [int(rank) for rank in verdict.split()[1:]]

    def _beat(self) -> None:
        self._beats.set(str(self.rank), f"{self._state} {self._number} {_place()}")

    def _go_on(self) -> None:
        with suppress(Exception):  # the store has ended, and the job with it
            while not self.has_ended:
                self._number = time.monotonic_ns()
                self._beat()
                self._agree(self._beats)  # the store may be gone when a failure reaches this rank
                self._wake.wait(BEAT_SECONDS)
                self._wake.clear()
            self._beat()  # which has the state in which it leaves, and is no sign of life

    def end(self, state: str = _FAILED) -> None:
        """Stop beating, and leave ``state`` in the store."""
        if self.has_ended:
            return
        self._state, self.has_ended = state, True
        atexit.unregister(self.end)
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(GRACE_SECONDS)
        self.store = None

    def leave(self) -> None:
        """Stop beating in good order, as the process group has been destroyed on this rank."""
        # The host of the store keeps it for the others, whose threads torch would otherwise let
        # print a lost connection with a backtrace.
        store, has_left = self.store, self.has_ended
        self.end(LEFT)
        end = time.monotonic() + _LEAVING_SECONDS
        with suppress(Exception):
            while self._is_host and not has_left and time.monotonic() < end:
                others = self._read(range(1, self._world_size)).values()
                if all(state in (LEFT, _FAILED) for state, _, _ in others):
                    break
                time.sleep(_POLL_SECONDS)
        del store


def _place() -> str:
    """Return what the main thread is doing: its innermost function, file and line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "unknown"
    code, line = frame.f_code, frame.f_lineno
    del frame  # which may be this one, whose callers would live on with it
    return f"{code.co_name} ({'/'.join(code.co_filename.split('/')[-3:])}:{line})"
