"""The spread between seeds, pooled over cells where it is the same, and intervals from it.

Two or three seeds tell the spread of their own cell poorly. That of all cells together is known
well, if they have the same one. Cells whose spread is significantly larger than that of the others
(F-test) are kept apart, and pooled among themselves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import f, t

#: A cell is kept apart if chance makes its spread as large as this rarely.
SIGNIFICANCE = 0.001


@dataclass(frozen=True)
class Spread:
    """The spread of single runs."""

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

    def half(self, number: int, confidence: float = 0.95) -> float:
        """Return half of the interval of a mean of that many runs (Student's t)."""
        return half_of([(self, number)], confidence)


def half_of(means: Sequence[tuple[Spread, int]], confidence: float = 0.95) -> float:
    """Return half of the interval of the sum or difference of means.

    Means with one spread in common share its degrees of freedom (Student's t); others have those of
    Welch and Satterthwaite.
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


@dataclass(frozen=True)
class Spreads:
    """The spread of each cell."""

    usual: Spread
    larger: Spread | None
    apart: frozenset[Hashable]

    @classmethod
    def of(cls, cells: Mapping[Hashable, Sequence[Sequence[float]]]) -> Spreads:
        """Pool the spread of cells, and keep apart those that differ."""
        together = {cell: spread for cell in cells if (spread := Spread.of(cells[cell]))}
        if not together:
            raise ValueError("no spread between seeds; valid: two equal runs at least")
        apart: dict[Hashable, Spread] = {}
        while len(together) > 1:
            chances = {}
            for cell, spread in together.items():
                rest = _pool([s for other, s in together.items() if other != cell])
                times = spread.deviation**2 / rest.deviation**2 if rest.deviation else math.inf
                chance = float(f.sf(times, spread.freedom, rest.freedom))
                chances[cell] = chance if spread.deviation else 1.0
            largest = min(chances, key=lambda cell: chances[cell])
            if chances[largest] >= SIGNIFICANCE:
                break
            apart[largest] = together.pop(largest)
        larger = _pool(list(apart.values())) if apart else None
        return cls(_pool(list(together.values())), larger, frozenset(apart))

    def __getitem__(self, cell: Hashable) -> Spread:
        """The spread of single runs of a cell."""
        return self.larger if self.larger and cell in self.apart else self.usual


def _pool(spreads: Sequence[Spread]) -> Spread:
    freedom = sum(spread.freedom for spread in spreads)
    squares = sum(spread.deviation**2 * spread.freedom for spread in spreads)
    return Spread(math.sqrt(squares / freedom), freedom)
