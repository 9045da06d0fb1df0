"""Tell the user of ranks, nodes and links that hold a run up, at the readings of its meters."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ...comm import Topology, measure_links, slow_link
from ..ranks import Job
from .stragglers import (
    WAIT_SHARE,
    RankTimes,
    Slow,
    least_wait_share,
    metrics_of,
    ranks_in_short,
    slow_ranks,
    where,
)
from .watch.clocks import Interval
from .watch.phases import AllReduceWait

#: Something is told once it held for this many readings in a row, and for this many seconds.
READINGS, SECONDS = 3, 3.0
#: A step is slow if it takes this many times what steps took at best.
SLOWER = 2.0


class _Streak:
    """For how long the same was found, reading after reading."""

    def __init__(self) -> None:
        self._what: object = None
        self._readings, self._seconds = 0, 0.0

    def add(self, what: object, seconds: float) -> bool:
        """Note what a reading found; whether this is the reading at which it is to be told."""
        if what != self._what:
            self._what, self._readings, self._seconds = what, 0, 0.0
        had = self._lasts
        self._readings, self._seconds = self._readings + 1, self._seconds + seconds
        return self._lasts and not had

    @property
    def _lasts(self) -> bool:
        return self._readings >= READINGS and self._seconds >= SECONDS


class StragglerReport:
    """Gathers the times of all ranks at each reading of the meters, and names what is slow.

    Args:
        job: The ranks.
        topology: The node of each rank.
        waiting: Measures the wait of this rank; None for a single rank.
        warn: Shows a warning, on rank 0.
    """

    def __init__(
        self,
        job: Job,
        topology: Topology,
        waiting: AllReduceWait | None,
        warn: Callable[[str], None],
    ) -> None:
        self._job, self._topology, self._waiting, self._warn = job, topology, waiting, warn
        self._is_first = True
        self._slow, self._links = _Streak(), _Streak()
        self._told: tuple[int, ...] = ()  # the ranks that the user knows of
        self._best = float("inf")  # seconds of a step in the fastest reading
        self._hosts: list[str] = []

    @property
    def slow(self) -> str:
        """The ranks that hold the others up as far as the user knows, in short; else empty."""
        return ranks_in_short(self._told, self._topology.nodes)

    def read(self, interval: Interval) -> dict[str, float]:
        """Return the metrics of the steps since the last reading; a collective.

        All ranks decide on the same numbers, and so take the same branches.
        """
        if self._waiting is None:
            return {}
        own = (interval.seconds(), sum(interval.waits), self._waiting.read())
        times = [RankTimes(*numbers) for numbers in self._job.all_gather(*own)]
        if self._is_first:  # libraries choose kernels, and compile
            self._is_first = False
        else:
            steps = len(interval.waits)
            self._look_at_ranks(times, steps)
            self._look_at_links(times, steps)
        return metrics_of(times)

    def _look_at_ranks(self, times: list[RankTimes], steps: int) -> None:
        slow = slow_ranks(times, self._topology.nodes)
        ranks = slow.ranks if slow else ()
        if not self._slow.add(ranks, max(time.total for time in times)) or ranks == self._told:
            return
        if slow:
            self._warn(f"{self._where(ranks)} {_holds_up(slow, steps)}")
        else:
            verb = "is" if len(self._told) == 1 else "are"
            self._warn(f"{self._where(self._told)} {verb} no longer slower than the other ranks")
        self._told = ranks

    def _look_at_links(self, times: list[RankTimes], steps: int) -> None:
        total = max(time.total for time in times)
        self._best = min(self._best, total / steps)
        times_best = total / steps / self._best
        share = least_wait_share(times)
        is_slower = times_best > SLOWER
        if not self._links.add((share > WAIT_SHARE, is_slower), total) or share <= WAIT_SHARE:
            return
        rates = measure_links(self._topology.nodes)
        node = slow_link(rates)
        if node is None and not is_slower:
            return  # links are alike, and as before: communication merely takes long
        line = f"every rank waits for the all-reduce for {share:.0%} of each step or more"
        if is_slower:
            line += f"; steps take {times_best:.1f} times as long as at best"
        if node is not None:
            host = self._host_names()[self._topology.nodes[node][0]]
            line += f"; the link of node {node} ({host}) is slow"
        if rates:
            listed = ", ".join(f"{rate / 1e6:.3g}" for rate in rates)
            line += f": the nodes receive {listed} MB/s, each from the one before it"
        self._warn(line)

    def _where(self, ranks: tuple[int, ...]) -> str:
        return where(ranks, self._topology.nodes, self._host_names())

    def _host_names(self) -> list[str]:
        self._hosts = self._hosts or self._job.gather(socket.gethostname())
        return self._hosts


def _holds_up(slow: Slow, steps: int) -> str:
    cause = "waiting for data" if slow.by_input else "computing"
    return (
        f"hold{'s' * (len(slow.ranks) == 1)} the other ranks up for {slow.share:.0%} of each step: "
        f"{slow.own / steps:.3g} s of own work against {slow.others / steps:.3g} s, "
        f"the difference in {cause}"
    )
