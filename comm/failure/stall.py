"""Notice that a run stands still long before its collectives time out.

The timeout of a collective has to leave room for the longest that a rank may keep the others
waiting: a checkpoint, an evaluation, a compilation. Here each rank watches its own steps. If one
takes far longer than the last ones did, it calls the roll. A rank that is merely late answers, and
a line says what each rank is doing. The process is ended only if a rank gives no sign of life.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from .roll import RollCall
from .roll_call import described, ranks_named

#: The shortest time after which a step is looked into, in seconds.
FLOOR_SECONDS = 30.0
#: A step is looked into when it has taken this many times the median of the last ones.
FACTOR = 10.0
#: Time without a sign of life after which a rank is missing, in seconds.
GRACE_SECONDS = 10.0

_STEPS = 33  # whose median is taken
_FIRST_STEPS = 2  # which may compile: nothing is said of them
_POLL_SECONDS = 0.5


def patience_seconds(steps: Sequence[float], floor_seconds: float = FLOOR_SECONDS) -> float:
    """Return the seconds after which a step is looked into, given those of the last steps."""
    return max(floor_seconds, FACTOR * statistics.median(steps)) if steps else floor_seconds


class StallWatch:
    """Watches the steps of this rank on a thread; every rank needs one.

    It stops when it is closed, or when this rank leaves :func:`missing_ranks_named`.

    Args:
        roll_call: What :func:`join_roll_call` returned.
        end: Ends the process, given a line that names the missing ranks.
        say: Shows a line, on whichever rank is the first to have one of that step.
        floor_seconds: The shortest time after which a step is looked into.
        grace_seconds: Time without a sign of life after which a rank is missing.
    """

    def __init__(
        self,
        roll_call: RollCall,
        end: Callable[[str], None],
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        *,
        floor_seconds: float = FLOOR_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._roll_call, self._end, self._say = roll_call, end, say
        self._floor, self._grace = floor_seconds, grace_seconds
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._number, self._in_step = 0, False
        self._since = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="largebatch-stalls", daemon=True)
        self._thread.start()

    def begin(self, number: int) -> None:
        """Note that a step begins."""
        self._number, self._in_step, self._since = number, True, time.monotonic()

    def finish(self) -> None:
        """Note that the step has ended."""
        now = time.monotonic()
        self._steps.append(now - self._since)
        self._in_step, self._since = False, now

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        since, next_look, looks = self._since, 0.0, 0
        while not self._closed.wait(min(_POLL_SECONDS, self._floor / 4)):
            if self._roll_call.has_ended:
                return
            if self._since != since:
                since, next_look, looks = self._since, 0.0, 0
            seconds = time.monotonic() - since
            if seconds > max(next_look, patience_seconds(list(self._steps), self._floor)):
                looks += 1
                self._look(since, looks)
                next_look = 2 * seconds  # less often, the longer it takes

    def _look(self, since: float, number: int) -> None:
        roll = self._roll_call.call(grace_seconds=self._grace, is_inquiry=True)
        # After the end in good order, the store may be gone too.
        if self._since != since or self._closed.is_set() or self._roll_call.has_ended:
            return
        took = f"{self._what()} has taken {time.monotonic() - since:.0f} s"
        if roll is None or roll.missing:
            away = "the job's store does not answer: this rank is cut off"
            if roll is not None:
                away = described(roll.missing, self._grace)
            self._end(f"rank {self._roll_call.rank}: {took}; {away}")
        elif self._in_step and len(self._steps) >= _FIRST_STEPS:
            usual = statistics.median(list(self._steps))
            line = f"{took}, where others took {usual:.2g} s; all ranks answer: "
            # Where nobody reads standard error, or the store has just ended: watch on.
            with suppress(OSError, ValueError, RuntimeError):
                if self._roll_call.is_first(f"{self._number}/{number}"):
                    self._say(line + _listed(roll.places))

    def _what(self) -> str:
        return f"step {self._number}" if self._in_step else f"what follows step {self._number}"


def _listed(places: Mapping[int, str]) -> str:
    """Return what ranks are doing, those first of whom there are fewest."""
    ranks: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks.setdefault(place, []).append(rank)
    groups = sorted(ranks.items(), key=lambda group: len(group[1]))
    lines = [f"{ranks_named(those)} in {place}" for place, those in groups[:3]]
    return "; ".join([*lines, "…"] if len(groups) > 3 else lines)
