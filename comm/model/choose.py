"""From measured or predicted times to a plan's rules: a pure function of the times.

The flat ring stays wherever nothing beats it by more than the tolerance. Elsewhere the rules are
the fewest that are, at every size there is a time for, within the tolerance of the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from ..plan import Rule

#: Times by size in bytes and by candidate, a rule without ``max_bytes``. In seconds.
Times = Mapping[int, Mapping[Rule, float]]

#: Differences up to this share are taken as noise.
TOLERANCE = 0.05

FLAT = Rule("ring")


def choose(times: Times, *, tolerance: float = TOLERANCE, default: Rule = FLAT) -> tuple[Rule, ...]:
    """The rules of a plan, ascending; the last one takes any size.

    At each size of ``times`` the rule that applies is ``default`` if that takes at most
    ``1 + tolerance`` times the fastest candidate's time, and otherwise another candidate that
    does. Between two sizes with different rules the limit is their geometric mean.

    Args:
        times: a candidate that has no time for a size is not chosen for it.

    Raises:
        ValueError: no sizes, or a size without candidates or with a time that is none.
    """
    if not times:
        raise ValueError("there are no times to choose by")
    sizes = sorted(times)
    good = [_good(times[size], size, tolerance, default) for size in sizes]
    chosen: list[Rule] = []
    while len(chosen) < len(sizes):
        start = len(chosen)
        reach = {rule: _reach(rule, good, start) for rule in good[start]}
        furthest = max(reach.values())
        span = range(start, furthest)
        # Of those that reach furthest, the fastest by the product of its times.
        best = min(
            (rule for rule, end in reach.items() if end == furthest),
            key=lambda rule: math.fsum(math.log(times[sizes[i]][rule]) for i in span),
        )
        chosen += [best] * len(span)
    rules = []
    for (size, rule), (next_size, next_rule) in pairwise(zip(sizes, chosen, strict=True)):
        if rule != next_rule:
            rules.append(replace(rule, max_bytes=math.isqrt(size * next_size)))
    return (*rules, replace(chosen[-1], max_bytes=None))


def _good(
    candidates: Mapping[Rule, float], size: int, tolerance: float, default: Rule
) -> dict[Rule, None]:
    """The candidates that may be chosen for a size, in their order."""
    if not candidates or not all(0 < t < math.inf for t in candidates.values()):
        raise ValueError(f"times for {size} bytes must be above 0: {dict(candidates)}")
    limit = min(candidates.values()) * (1 + tolerance)
    if candidates.get(default, math.inf) <= limit:
        return {default: None}
    return {rule: None for rule, seconds in candidates.items() if seconds <= limit}


def _reach(rule: Rule, good: list[dict[Rule, None]], start: int) -> int:
    """One past the last size from ``start`` on, without a gap, that ``rule`` may be chosen for."""
    end = start
    while end < len(good) and rule in good[end]:
        end += 1
    return end
