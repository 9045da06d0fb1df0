"""Which ranks hold the others up, from what each did between two readings of the meters.

In data-parallel training every step takes as long as the slowest rank. A rank's *own work* is the
time of its steps without its wait for the all-reduce. Where one rank or node is slower than all
others, it hardly waits, and the others wait for it. Where a link is slow, all of them wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...comm import ranks_named


@dataclass(frozen=True)
class RankTimes:
    """What a rank did in some steps, in seconds.

    Attributes:
        total: Time of the steps, without evaluations and checkpoints.
        input: Time that the rank waited for its data.
        wait: Time that it waited for the all-reduce after its own backward pass.
    """

    total: float
    input: float
    wait: float

    @property
    def own(self) -> float:
        """Time of its own work, with the wait for data."""
        return self.total - self.wait


#: Share of the time of a step by which ranks must be slower than all others to be named.
SHARE = 0.2
#: Share of the time of a step that every rank must wait for the all-reduce to be told of it.
WAIT_SHARE = 0.5


@dataclass(frozen=True)
class Slow:
    """Ranks that are slower than all others.

    Attributes:
        ranks: The ranks.
        own: Seconds of own work of the fastest of them.
        others: Seconds of own work of the slowest of the other ranks.
        share: What the others could save, as a share of the total time.
        by_input: Whether they wait for their data for most of what they are slower.
    """

    ranks: tuple[int, ...]
    own: float
    others: float
    share: float
    by_input: bool


def slow_ranks(times: Sequence[RankTimes], nodes: Sequence[Sequence[int]]) -> Slow | None:
    """Return the ranks that hold the others up; None if there are none, or it cannot be said.

    They stand apart by the largest gap in own work between any two ranks that are next to each
    other in order of it. Only few can hold the others up: one rank of two or three, a quarter of
    more, or whole nodes that are at most half.

    Args:
        times: Of each rank.
        nodes: The ranks on each node.
    """
    order = sorted(range(len(times)), key=lambda rank: times[rank].own)
    total = max(time.total for time in times)
    gaps = [times[b].own - times[a].own for a, b in pairwise(order)]
    if not gaps or total <= 0 or max(gaps) <= SHARE * total:
        return None
    split = gaps.index(max(gaps)) + 1
    fast, slow = order[:split], sorted(order[split:])
    whole = [node for node in nodes if set(node) <= set(slow)]
    are_nodes = sum(len(node) for node in whole) == len(slow) and 2 * len(whole) <= len(nodes)
    if len(slow) > max(1, len(times) // 4) and not are_nodes:
        return None
    waited = [statistics.median(times[rank].input for rank in ranks) for ranks in (slow, fast)]
    own = min(times[rank].own for rank in slow)
    return Slow(
        ranks=tuple(slow),
        own=own,
        others=max(times[rank].own for rank in fast),
        share=max(gaps) / total,
        by_input=waited[0] - waited[1] > max(gaps) / 2,
    )


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


def least_wait_share(times: Sequence[RankTimes]) -> float:
    """Return the share of the time that even the rank that waits least waits for the all-reduce."""
    return min(time.wait / time.total if time.total > 0 else 0.0 for time in times)


def where(ranks: Sequence[int], nodes: Sequence[Sequence[int]], hosts: Sequence[str]) -> str:
    """Name ranks by their nodes: ``rank 5 on node 1 (HOST)``, ``node 1 (HOST, ranks 4 to 7)``.

    Args:
        ranks: The ranks, ascending.
        nodes: The ranks on each node.
        hosts: The name of each rank's machine.
    """
    found = []
    for number, node in enumerate(nodes):
        here = [rank for rank in ranks if rank in node]
        if here and len(here) == len(node) > 1 and len(nodes) > 1:
            found.append(f"node {number} ({hosts[here[0]]}, {ranks_named(here)})")
        elif here:
            found.append(f"{ranks_named(here)} on node {number} ({hosts[here[0]]})")
    return " and ".join(found)


def ranks_in_short(ranks: Sequence[int], nodes: Sequence[Sequence[int]]) -> str:
    """Name ranks, or whole nodes: ``rank 5``, ``node 1``; empty if there are none.

    Args:
        ranks: The ranks, ascending.
        nodes: The ranks on each node.
    """
    whole = [n for n, node in enumerate(nodes) if len(node) > 1 and {*node} <= {*ranks}]
    if whole and sum(len(nodes[n]) for n in whole) == len(ranks):
        return ranks_named(whole).replace("rank", "node")
    return ranks_named(ranks) if ranks else ""
