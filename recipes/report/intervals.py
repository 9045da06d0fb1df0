"""Means over seeds with 95 % intervals, by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean, or a difference of means.

    Attributes:
        mean: The mean.
        half: Half the width of its 95 % interval; None with a single value, which has none.
        count: Number of values; of a difference, the smaller one.
    """

    mean: float
    half: float | None
    count: int

    @property
    def is_resolved(self) -> bool:
        """Whether the interval leaves out 0. False without an interval."""
        return self.half is not None and abs(self.mean) > self.half


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value."""
    found, count = statistics.fmean(values), len(values)
    if count < 2:
        return Estimate(found, None, count)
    half = _quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Estimate(found, half, count)


def difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Return the mean of ``values`` minus that of ``others``, with Welch's interval.

    The two may have other variances and numbers of values. Neither is empty.
    """
    found = statistics.fmean(values) - statistics.fmean(others)
    count = min(len(values), len(others))
    if count < 2:
        return Estimate(found, None, count)
    parts = [statistics.variance(each) / len(each) for each in (values, others)]
    total = sum(parts)
    if not total:
        return Estimate(found, 0.0, count)
    freedom = total**2 / sum(
        part**2 / (len(each) - 1) for part, each in zip(parts, (values, others), strict=True)
    )
    return Estimate(found, _quantile(freedom) * math.sqrt(total), count)


def _quantile(freedom: float) -> float:
    """The quantile of Student's t for a two-sided interval."""
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
