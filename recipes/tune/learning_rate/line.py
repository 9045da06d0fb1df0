"""The last stage of a search: a line in the learning rate, then a second seed for the best two.

The rates on the line are the best coarse trial's times powers of 3/2, with all else held fixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .space import rounded

STEP = 1.5
#: Most rates on the line.
LONGEST = 9

#: Accuracy and negative loss: what orders results. A run that diverged has :data:`WORST`.
Score = tuple[float, float]
WORST: Score = (-math.inf, -math.inf)
#: Results by place on the line, 0 at its centre, and number of the seed.
Results = Mapping[tuple[int, int], Score]


def rate_at(centre: float, place: int) -> float:
    """The rate at a place of the line, in three digits; at its centre as it is."""
    return rounded(centre * STEP**place) if place else centre


def next_place(results: Results, centre: float, lowest: float, highest: float) -> tuple[int, int]:
    """Place and seed of the next trial, within the rates; those of a known one if none is left."""
    line = {place: score for (place, seed), score in results.items() if not seed}
    if 0 not in line:
        return 0, 0
    best = max(line, key=lambda place: line[place])
    fails = min((place for place in line if line[place] == WORST), default=LONGEST)
    for place in (best - 1, best + 1):
        inside = lowest <= rate_at(centre, place) <= highest
        if place not in line and place < fails and inside and len(line) < LONGEST:
            return place, 0
    ranked = sorted(line, key=lambda place: line[place], reverse=True)
    for place in ranked[:2]:
        if line[place] != WORST and (place, 1) not in results:
            return place, 1
    return 0, 0


def best_place(results: Results) -> int:
    """The best place: by the mean of two seeds if the best two have them, else by the first."""
    twice = {place: _mean_at(results, place) for place, seed in results if seed}
    line = {place: score for (place, seed), score in results.items() if not seed}
    known = twice if len(twice) > 1 else line
    return max(known, key=lambda place: known[place])


def _mean_at(results: Results, place: int) -> Score:
    """The mean result of the seeds at a place."""
    own = [score for (at, _), score in results.items() if at == place]
    top1, loss = (sum(values) / len(own) for values in zip(*own, strict=True))
    return round(top1, 6), loss  # equal numbers of images are equal
