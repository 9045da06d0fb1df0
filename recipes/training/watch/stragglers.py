"""Which ranks hold the others up, from what each did between two readings of the meters.

In data-parallel training every step takes as long as the slowest rank. A rank's *own work* is the
time of its steps without its wait for the all-reduce. A rank that is slower than all others hardly
waits, and the others wait for it. Where a link is slow, all of them wait.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ....comm import ranks_named
from ...ranks import Job

#: Share of the time of a step by which ranks must be slower than all others to be named.
SHARE = 0.2
#: A warning is given once it held for this many readings in a row, and for this many seconds.
READINGS, SECONDS = 3, 3.0


class RankTimes(NamedTuple):
    """Seconds of a rank in some steps, its wait for data and its wait after its own backward."""

    total: float  # without evaluations and checkpoints
    input: float
    wait: float  # for the all-reduce

    @property
    def own(self) -> float:
        """Time of its own work, with the wait for data."""
        return self.total - self.wait


class Slow(NamedTuple):
    """Ranks that are slower than all others."""

    ranks: tuple[int, ...]
    own: float  # seconds of own work of the fastest of them
    others: float  # seconds of own work of the slowest of the other ranks
    share: float  # of the total time: what the others could save
    by_input: bool  # whether most of the difference is waiting for data


def slow_ranks(times: Sequence[RankTimes]) -> Slow | None:
    """Return the ranks that hold the others up; None if there are none, or it cannot be said.

    They stand apart by the largest gap in own work between any two ranks that are next to each
    other in order of it. Only few can hold the others up: one of two or three, a quarter of more.
    """
    order = sorted(range(len(times)), key=lambda rank: times[rank].own)
    total = max(time.total for time in times)
    gaps = [times[b].own - times[a].own for a, b in pairwise(order)]
    if not gaps or total <= 0 or max(gaps) <= SHARE * total:
        return None
    split = gaps.index(max(gaps)) + 1
    fast, slow = order[:split], order[split:]
    if len(slow) > max(1, len(times) // 4):
        return None
    waited = [statistics.median(times[rank].input for rank in ranks) for ranks in (slow, fast)]
    own, others = times[order[split]].own, times[order[split - 1]].own
    by_input = waited[0] - waited[1] > max(gaps) / 2
    return Slow(tuple(sorted(slow)), own, others, max(gaps) / total, by_input)


def metrics_of(times: Sequence[RankTimes]) -> dict[str, float]:
    """Return the metrics of a reading; see docs/guides/watch.md."""
    order = sorted(range(len(times)), key=lambda rank: times[rank].own)
    waits = [time.wait for time in times]
    return {
        "all_reduce_wait_seconds": statistics.median(waits),
        "least_all_reduce_wait_seconds": min(waits),
        "slowest_rank": order[-1],
        "slowest_rank_seconds": times[order[-1]].own - times[order[-2]].own,
    }


class StragglerReport:
    """Gathers the times of all ranks at each reading of the meters, and names what is slow.

    Args:
        job: The ranks.
        warn: Shows a warning, on rank 0.

    Attributes:
        slow: The ranks that hold the others up as far as the user knows, in short; else empty.
    """

    def __init__(self, job: Job, warn: Callable[[str], None]) -> None:
        self._job, self._warn, self.slow = job, warn, ""
        self._found, self._lasted = "", [0.0]  # by the last readings, and their seconds
        self._is_first = True

    def read(self, total: float, waited: float, all_reduce: float, steps: int) -> dict[str, float]:
        """Return the metrics of the steps since the last reading; a collective.

        All ranks decide on the same numbers, and so take the same branches.

        Args:
            total: Seconds of this rank's steps, without evaluations and checkpoints.
            waited: Seconds of them that it waited for its data.
            all_reduce: Seconds of them that it waited for the all-reduce.
            steps: Number of steps.
        """
        gathered = self._job.all_gather(total, waited, all_reduce)
        times = [RankTimes(*numbers) for numbers in gathered]
        if not self._is_first:  # in which libraries choose kernels, and compile
            self._look(times, steps)
        self._is_first = False
        return metrics_of(times)

    def _look(self, times: list[RankTimes], steps: int) -> None:
        slow = slow_ranks(times)
        name = ranks_named(slow.ranks) if slow else ""
        total = max(time.total for time in times)
        self._lasted = [*(self._lasted if name == self._found else []), total]
        self._found = name
        if len(self._lasted) < READINGS or sum(self._lasted) < SECONDS or name == self.slow:
            return
        if slow:
            hosts = self._job.gather(socket.gethostname())
            self._warn(
                f"the other ranks wait for {name} ({', '.join({hosts[r]: 0 for r in slow.ranks})}) "
                f"for {slow.share:.0%} of each step: {slow.own / steps:.3g} s of own work against "
                f"{slow.others / steps:.3g} s, the difference in "
                f"{'waiting for data' if slow.by_input else 'computing'}"
            )
        else:
            self._warn(f"the other ranks no longer wait for {self.slow}")
        self.slow = name
