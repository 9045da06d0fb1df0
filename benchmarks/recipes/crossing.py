"""The number of epochs at which a batch size reaches an accuracy, with an interval.

Each run has a schedule of its own length, so that a run is one point of accuracy against epochs. A
curve in the logarithm of epochs is fitted to these points by least squares and inverted where it
meets the target. The interval holds the lengths at which the difference of curve and target is not
significant (Fieller 1954); it takes in the spread of the runs, that of the target, and the
distances of lengths from the curve that seeds do not explain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

from benchmarks.recipes.spread import Spread

NO_MISFIT = Spread(0.0, math.inf)
#: Lengths at which the curve is compared with the target, between the shortest and longest run.
_STEPS = 2000


@dataclass(frozen=True)
class Target:
    """An accuracy to reach in percent, with its standard error and that one's freedom."""

    top1: float
    error: float = 0.0
    freedom: float = math.inf

    @classmethod
    def mean_of(cls, top1: Sequence[float]) -> Target:
        """The mean accuracy of some runs, at least two, in percent."""
        error = statistics.stdev(top1) / math.sqrt(len(top1))
        return cls(statistics.mean(top1), error, len(top1) - 1)


@dataclass(frozen=True)
class Crossing:
    """The epochs at which a curve meets a target, within the lengths that were trained.

    Beyond them, the estimate is 0 or infinite; an end of its interval that is known no better is
    the shortest or longest run, 0 or infinite, whichever makes the interval wider.
    """

    epochs: float
    low: float
    high: float


def crossing(
    epochs: Sequence[float],
    top1: Sequence[float],
    target: Target,
    confidence: float = 0.95,
    spread: Spread | None = None,
    misfit: Spread = NO_MISFIT,
) -> Crossing:
    """Estimate where accuracy against epochs meets a target.

    The curve is a parabola in the logarithm of epochs where there are at least three lengths and
    four runs, else a line: through three lengths with eight seeds each, the bend that a line leaves
    out is larger than the noise.
    """
    lengths = sorted(set(epochs))
    degree = degree_of(epochs)
    if len(lengths) < 2 or len(top1) < 3:
        raise ValueError(
            f"{len(top1)} runs of {len(lengths)} lengths; valid: three runs of two lengths"
        )
    centre = math.log(lengths[0] * lengths[-1]) / 2  # for the condition of the matrix

    def powers(of: Sequence[float]) -> np.ndarray:
        return np.vander(np.log(np.asarray(of, dtype=float)) - centre, degree + 1)

    design, accuracy = powers(epochs), np.asarray(top1)
    if spread is None:
        freedom = len(top1) - degree - 1
        residuals = accuracy - design @ np.linalg.lstsq(design, accuracy, rcond=None)[0]
        spread = Spread(math.sqrt(residuals @ residuals / freedom), freedom)
    # The runs of a length share their distance from the curve, so that their mean counts as one.
    seeds = np.array([epochs.count(length) for length in epochs])
    certainty = 1 / (max(spread.deviation, 1e-9) ** 2 + seeds * misfit.deviation**2)
    inverse = np.linalg.inv((design.T * certainty) @ design)
    weights = inverse @ (design.T * certainty) @ accuracy

    grid = np.geomspace(lengths[0], lengths[-1], _STEPS)
    at = powers(list(grid))
    ahead = at @ weights - target.top1
    of_curve = np.einsum("ij,jk,ik->i", at, inverse, at)
    variance = of_curve + target.error**2
    freedom_of_curve = (misfit if misfit.deviation else spread).freedom
    # Welch and Satterthwaite: two variances, each with degrees of freedom of its own.
    joint = np.divide(
        variance**2,
        of_curve**2 / freedom_of_curve + target.error**4 / target.freedom,
        out=np.full_like(variance, math.inf),
        where=variance > 0,
    )
    half = t.ppf((1 + confidence) / 2, joint) * np.sqrt(variance)
    low, high = _first(grid, ahead + half >= 0), _first(grid, ahead >= half)
    return Crossing(_first(grid, ahead >= 0), min(low, lengths[-1]), max(high, lengths[0]))


def degree_of(epochs: Sequence[float]) -> int:
    """The degree of the curve through runs of these lengths."""
    return 2 if len(set(epochs)) >= 3 and len(epochs) > 3 else 1


def misfit_of(cells: Sequence[tuple[Sequence[float], Sequence[float]]], spread: Spread) -> Spread:
    """How far the lengths of cells lie from their curves, beyond the spread of seeds.

    The moment estimate of the standard deviation of a length's distance from the curve, pooled over
    the cells; its degrees of freedom are those of the lengths that the curves leave.
    """
    squares, expected, freedom = 0.0, 0.0, 0
    for epochs, top1 in cells:
        lengths, degree = sorted(set(epochs)), degree_of(epochs)
        if len(lengths) <= degree + 1:
            continue
        curve, _ = np.linalg.qr(np.vander(np.log(epochs) - np.log(epochs).mean(), degree + 1))
        member = np.array([[e == length for length in lengths] for e in epochs], dtype=float)
        left = member @ np.diag(1 / member.sum(axis=0)) @ member.T - curve @ curve.T
        squares += float(np.asarray(top1) @ left @ np.asarray(top1))
        expected += float(np.trace(member.T @ left @ member))
        freedom += len(lengths) - degree - 1
    beyond = squares - freedom * spread.deviation**2
    return Spread(math.sqrt(beyond / expected), freedom) if beyond > 0 else NO_MISFIT


def ratio(of: Crossing, to: Crossing) -> Crossing:
    """Estimate how many times the epochs of one crossing another one takes.

    The interval is made from those of the two, which are independent: in logarithms, the distance
    of an end from the estimate is the root of the summed squares of the two distances (Zou and
    Donner 2008, "Construction of confidence limits about effect measures"). Where ``of`` has no
    estimate, its known end is divided by the unfavourable end of ``to``.
    """
    if not 0 < to.epochs < math.inf:
        raise ValueError(f"{to} has no estimate; valid: one within the lengths that were trained")
    if of.epochs == 0:
        return Crossing(0.0, 0.0, of.high / to.low if to.low else math.inf)
    if math.isinf(of.epochs):
        return Crossing(math.inf, of.low / to.high, math.inf)

    def distance(one: float, other: float) -> float:
        return abs(math.log(one / other)) if 0 < one < math.inf else math.inf

    middle = of.epochs / to.epochs
    below = math.hypot(distance(of.low, of.epochs), distance(to.high, to.epochs))
    above = math.hypot(distance(of.high, of.epochs), distance(to.low, to.epochs))
    return Crossing(middle, middle * math.exp(-below), _times(middle, above))


def interval(value: Crossing, places: int = 2, unit: str = "") -> str:
    """An estimate and its interval; an end beyond the lengths that were trained is left open."""

    def shown(number: float) -> str:
        return f"{number:.{places}f}"

    low, high = value.low > 0, value.high < math.inf
    if not (low or high):
        return "?"
    if not 0 < value.epochs < math.inf:
        return (f"> {shown(value.low)}" if low else f"< {shown(value.high)}") + unit
    if value.low == value.high:
        return shown(value.epochs) + unit
    if low and high:
        ends = f"{shown(value.low)} to {shown(value.high)}"
    else:
        ends = f"at least {shown(value.low)}" if low else f"at most {shown(value.high)}"
    return f"{shown(value.epochs)}{unit} ({ends})"


def _times(middle: float, distance: float) -> float:
    return middle * math.exp(distance) if math.isfinite(distance) else math.inf


def _first(lengths: np.ndarray, reached: np.ndarray) -> float:
    """The first length at which something holds: 0 if at the first, infinite if at none."""
    if reached[0]:
        return 0.0
    return float(lengths[np.argmax(reached)]) if reached.any() else math.inf
