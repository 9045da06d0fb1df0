"""Choose the rules of a plan from measured or predicted times: a pure function of the times.

The flat ring is kept wherever nothing beats it by more than the tolerance. Elsewhere the result is
the smallest number of rules that stay within the tolerance of the fastest candidate at every size
with a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from ..plan import Rule

#: Seconds by message size in bytes and by candidate, a rule without ``max_bytes``.
Times = Mapping[int, Mapping[Rule, float]]

#: Relative differences up to this value are treated as noise.
TOLERANCE = 0.05

FLAT_RING = Rule("ring")


def choose(times: Times, *, tolerance: float = TOLERANCE) -> tuple[Rule, ...]:
    """Choose the rules of a plan, ascending by size; the last one takes any size.

    At each size of ``times``, the rule is the flat ring if that takes at most ``1 + tolerance``
    times as long as the fastest candidate, and otherwise another candidate that does. The limit
    between two sizes with different rules is their geometric mean.

    Args:
        times: a candidate without a time for a size is not chosen at that size.
        tolerance: relative difference that is treated as noise.

    Raises:
        ValueError: there are no sizes, a size has no candidates, or a time is not positive and
            finite.
    """
    if not times:
        raise ValueError("times: empty; valid: at least one size")
    sizes = sorted(times)
    good = [_good(times[size], size, tolerance) for size in sizes]
    chosen: list[Rule] = []
    while len(chosen) < len(sizes):
        start = len(chosen)
        # Up to which size each rule may be chosen.
        reach = {
            rule: next((at for at in range(start, len(sizes)) if rule not in good[at]), len(sizes))
            for rule in good[start]
        }
        furthest = max(reach.values())
        span = range(start, furthest)
        # Of the rules that reach furthest, take the fastest by the product of its times.
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


def _good(candidates: Mapping[Rule, float], size: int, tolerance: float) -> dict[Rule, None]:
    """Return the candidates that may be chosen at a size, in the given order."""
    if not candidates or not all(0 < t < math.inf for t in candidates.values()):
        raise ValueError(
            f"times: {dict(candidates)} at {size} bytes; valid: positive seconds by rule"
        )
    limit = min(candidates.values()) * (1 + tolerance)
    if candidates.get(FLAT_RING, math.inf) <= limit:
        return {FLAT_RING: None}
    return {rule: None for rule, seconds in candidates.items() if seconds <= limit}
