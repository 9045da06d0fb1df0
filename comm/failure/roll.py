"""A rank's side of the roll call: a thread that answers, and the calls, through the job's store."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

#: Time allowed for an answer. It comes from a thread that has nothing else to do.
GRACE_SECONDS = 3.0

_FOREVER = timedelta(days=365)
_LONGEST_VERDICT = timedelta(seconds=30)
_POLL_SECONDS = 0.02

#: Time for which the rank that hosts the store keeps it for ranks that have not left yet.
_LEAVING_SECONDS = 2.0


@dataclass(frozen=True)
class Roll:
    """What a roll call found.

    Attributes:
        number: Number of the call, from 1.
        missing: The ranks that did not answer, ascending.
        places: What the main thread of each rank that answered was doing, on the rank that called;
            empty on others that took over its verdict.
    """

    number: int
    missing: list[int]
    places: dict[int, str] = field(default_factory=dict)


#: States of a rank in the store.
_IN, _TERMINATED, LEFT = "in", "terminated", "left"

_INQUIRY = "?"  # begins a verdict that is not final


class RollCall:
    """One rank's side of the roll call: a thread that answers, and a method that calls.

    Calls are numbered. Each rank is woken by a key of its own, so that it can wake its own thread
    to end it. If several ranks call at the same time, one asks and the others wait for its verdict.

    Attributes:
        rank: This rank.
        store: The job's store; None if this rank no longer answers.
        has_ended: Whether this rank no longer answers.
        is_told: Whether an error of this rank names the missing ranks.
        is_failing: Whether this rank has such an error, and asks which ranks are missing.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank, self._world_size = rank, world_size
        self.is_told = self.is_failing = False
        # A client that waits holds its connection, so answering needs one of its own, and so do
        # calls: one may hang, and this rank must be able to end. All are made before a failure.
        self._store, self._waiting, self._asking = (
            dist.PrefixStore("largebatch/roll-call", store.clone()) for _ in range(3)
        )
        # Kept for calls: the process that hosts the store ends it with the last reference.
        self.store: Any | None = store
        self._number = 1  # of the next call
        self._known: list[int] = []  # missing ranks by the first verdict
        self.has_ended = False
        self._calling = threading.Lock()
        self._heard = 0.0  # when the store answered last, to a call
        self._store.set(f"state/{rank}", _IN)
        # Calls from before this rank came, or while it was out, as its own end looks like one.
        while self._store.check([f"{self._number}/wake/{rank}"]):
            self._store.set(f"{self._number}/here/{rank}", _place())
            self._number += 1
        self._thread = threading.Thread(
            target=self._answer, name="largebatch-roll-call", daemon=True
        )
        self._thread.start()
        # A thread that returned from the store during interpreter shutdown would crash it.
        atexit.register(self.end)

    def call(
        self,
        *,
        grace_seconds: float = GRACE_SECONDS,
        is_terminated: bool = False,
        is_inquiry: bool = False,
        after: int = 0,
    ) -> Roll | None:
        """Call the roll; None if the store does not answer for four times ``grace_seconds``.

        Calls of one rank follow one another: this one waits for an inquiry that is under way.

        With ``is_terminated`` or ``is_inquiry``, ranks that have received SIGTERM, have left in
        good order or have not come yet are not missing.

        Args:
            grace_seconds: Time allowed for an answer.
            is_terminated: Whether this rank has received SIGTERM.
            is_inquiry: Whether nothing has failed yet. The verdict is not final then, and is of a
                call that had not ended before.
            after: Number of a call whose verdict, like all before it, is out of date.
        """
        rolls: list[Roll] = []

        def call() -> None:
            # Whatever the store raises when the process that hosts it has ended.
            with suppress(Exception), self._calling:
                if is_terminated:
                    self._asking.set(f"state/{self.rank}", _TERMINATED)
                rolls.append(self._call(grace_seconds, is_terminated, is_inquiry, after))

        # The store does not return if the network to its host is gone.
        thread = threading.Thread(target=call, name="largebatch-calls-the-roll", daemon=True)
        start = time.monotonic()
        thread.start()
        while thread.is_alive() and time.monotonic() < max(start, self._heard) + 4 * grace_seconds:
            thread.join(_POLL_SECONDS)
        return rolls[0] if rolls else None

    def _call(
        self, grace_seconds: float, is_terminated: bool, is_inquiry: bool, after: int
    ) -> Roll:
        if self._known:
            return Roll(self._number, self._known)
        # If this rank has just answered a call for this failure, that was the previous number.
        current = max(self._number, after + 1)
        if is_inquiry:  # a verdict that is there already may be minutes old
            after = max(after, current - 2)
            while self._has(f"{after + 1}/verdict"):
                after += 1
            current = max(current, after + 1)
        for number in sorted({max(1, current - 1, after + 1), current}):
            verdict, places = self._verdict(number, grace_seconds, is_terminated, is_inquiry)
            is_stale = verdict.startswith(_INQUIRY) and not is_inquiry
            missing = [] if is_stale else _ranks(verdict)
            if missing or (number == current and not is_stale):
                return Roll(number, missing, places)
        # Another rank's inquiry was answered in place of this call.
        return self._call(grace_seconds, is_terminated, is_inquiry, after=current)

    def _verdict(
        self, number: int, grace_seconds: float, is_terminated: bool, is_inquiry: bool
    ) -> tuple[str, dict[int, str]]:
        key = f"{number}/verdict"
        if self._asking.add(f"{number}/callers", 1) > 1:
            end = time.monotonic() + 1.5 * grace_seconds
            while not self._has(key) and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
        if self._has(key):
            return self._asking.get(key).decode(), {}
        # This rank asks first, or the one that asked has ended.
        for rank in range(self._world_size):
            self._asking.set(f"{number}/wake/{rank}", "")
        absent = set(range(self._world_size)) - {self.rank}
        places = {self.rank: _place()}
        end = time.monotonic() + grace_seconds
        is_over = False
        while absent and not is_over:
            is_over = time.monotonic() > end  # look once more: this rank may have been suspended
            for rank in sorted(absent):
                if self._has(f"{number}/here/{rank}"):
                    places[rank] = self._asking.get(f"{number}/here/{rank}").decode()
            absent -= places.keys()
            if is_terminated or is_inquiry:
                absent = {rank for rank in absent if self._state(rank) == _IN}
            time.sleep(_POLL_SECONDS)
        verdict = _INQUIRY * is_inquiry + ",".join(map(str, sorted(absent)))
        self._asking.set(key, verdict)
        return verdict, places

    def _state(self, rank: int) -> str:
        key = f"state/{rank}"
        return self._asking.get(key).decode() if self._has(key) else ""

    def _has(self, key: str) -> bool:
        found: bool = self._asking.check([key])
        self._heard = time.monotonic()
        return found

    def _answer(self) -> None:
        with suppress(Exception):  # the store has ended, and the job with it
            while True:
                self._waiting.wait([f"{self._number}/wake/{self.rank}"], _FOREVER)
                if self.has_ended:
                    return
                number = self._number
                self._waiting.set(f"{number}/here/{self.rank}", _place())
                self._number += 1
                # Keep the verdict: the store may be gone when the failure reaches this rank.
                try:
                    self._waiting.wait([f"{number}/verdict"], _LONGEST_VERDICT)
                except dist.DistStoreError:
                    continue  # the rank that asked has stopped; answer the next that asks
                verdict = self._waiting.get(f"{number}/verdict").decode()
                if not verdict.startswith(_INQUIRY):
                    self._known = self._known or _ranks(verdict)

    def end(self, state: str | None = None) -> None:
        """Stop answering, and leave ``state`` in the store."""
        if self.has_ended:
            return
        self.has_ended = True
        atexit.unregister(self.end)
        with suppress(Exception):  # the store has ended
            if state is not None:
                self._store.set(f"state/{self.rank}", state)
            self._store.set(f"{self._number}/wake/{self.rank}", "")
            if threading.current_thread() is not self._thread:
                self._thread.join(GRACE_SECONDS)
            self._store.set(f"has-ended/{self.rank}", "")
        self.store = None

    def leave(self, *, is_host: bool) -> None:
        """Stop answering, in good order, as the process group has been destroyed on this rank.

        The rank that hosts the store keeps it until the other ranks have left too, but no longer
        than ``_LEAVING_SECONDS``: torch prints a lost connection of their threads with a backtrace.
        """
        if self.has_ended:
            return
        store = self.store
        self.end(LEFT)
        if not is_host:
            return
        end = time.monotonic() + _LEAVING_SECONDS
        with suppress(Exception):
            for rank in range(self._world_size):
                while not self._has(f"has-ended/{rank}") and time.monotonic() < end:
                    time.sleep(_POLL_SECONDS)
        del store


def _place() -> str:
    """Return what the main thread is doing: its innermost function, file and line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "unknown"
    code = frame.f_code
    return f"{code.co_name} ({'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno})"


def _ranks(verdict: str) -> list[int]:
    numbers = verdict.removeprefix(_INQUIRY)
    return [int(rank) for rank in numbers.split(",")] if numbers else []
