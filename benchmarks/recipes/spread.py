"""The spread between seeds, and intervals from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t


@dataclass(frozen=True)
class Spread:
    """The standard deviation of single runs, and its degrees of freedom."""

    deviation: float
    freedom: float

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]]) -> Spread | None:
        """Return the spread within groups of equal runs, None if none of them has two."""
        several = [group for group in groups if len(group) > 1]
        freedom = sum(len(group) - 1 for group in several)
        if not freedom:
            return None
        squares = sum(statistics.variance(group) * (len(group) - 1) for group in several)
        return cls(math.sqrt(squares / freedom), freedom)


def half_of(means: Sequence[tuple[Spread, int]], confidence: float = 0.95) -> float:
    """Return half of the interval of the sum or difference of means.

    Each mean has its spread and its number of runs. Means that share one spread, the same object,
    share its degrees of freedom (Student's t); others have those of Welch and Satterthwaite.
    """
    variances: dict[int, float] = {}
    freedoms: dict[int, float] = {}
    for spread, number in means:
        variances[id(spread)] = variances.get(id(spread), 0.0) + spread.deviation**2 / number
        freedoms[id(spread)] = spread.freedom
    total = sum(variances.values())
    if total == 0:
        return 0.0
    freedom = total**2 / sum(v**2 / freedoms[key] for key, v in variances.items())
    return float(t.ppf((1 + confidence) / 2, freedom)) * math.sqrt(total)
