"""Who wins a race: pure functions of the times, which say how sure the order is.

Contenders run in turn, so the times of one round share the machine's disturbances. The ratio of two
contenders is therefore taken in each round, and its interval is that of Student's t over the
logarithms of these ratios: the mean of the logarithms is the logarithm of the geometric mean. The
times are looked at after :data:`LOOKS` rounds, and at each look all are compared with the one that
then happens to be the fastest, which may be any pair of :data:`MOST_CONTENDERS`. Each pair at each
look has an equal part of the error probability of 5 %, so that the chance that any interval of a
race misses its true ratio is at most 5 % (Bonferroni).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..model.choose import TOLERANCE

#: Numbers of rounds after which the order is judged.
LOOKS = (3, 6, 12, 24)

#: Largest number of contenders, for whose pairs the intervals are made.
MOST_CONTENDERS = 4

#: Contenders whose times differ by less than this fraction are equally fast for any purpose.
EQUAL_WITHIN = 0.02

# Student's t at a probability of 1 - 0.05 / 4 looks / 6 pairs / 2, for one degree of freedom less
# than the rounds.
_QUANTILES = {3: 21.8747, 6: 5.8397, 12: 4.0008, 24: 3.4682}


@dataclass(frozen=True)
class Ratio:
    """The time of a contender relative to another, with an interval.

    With a probability of 95 %, all intervals of a race hold their true ratios together.

    Attributes:
        ratio: geometric mean over the rounds; above 1 means slower.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    ratio: float
    low: float
    high: float

    @property
    def order(self) -> Literal["slower", "faster", "equal", "open"]:
        """What the interval says; ``equal`` means within :data:`EQUAL_WITHIN`."""
        if max(self.high, 1 / self.low) <= 1 + EQUAL_WITHIN:
            return "equal"
        if self.low > 1:
            return "slower"
        return "faster" if self.high < 1 else "open"


def ratio(seconds: Sequence[float], of_other: Sequence[float]) -> Ratio:
    """Compare two contenders by their times in the same rounds.

    Args:
        seconds: the times of one in each round, positive.
        of_other: the times of the other in the same rounds.

    Raises:
        ValueError: the number of rounds is not one of :data:`LOOKS`.
    """
    rounds = len(seconds)
    if rounds not in _QUANTILES or rounds != len(of_other):
        raise ValueError(
            f"seconds: {rounds} and {len(of_other)} rounds; valid: {', '.join(map(str, LOOKS))}"
        )
    logs = [math.log(a / b) for a, b in zip(seconds, of_other, strict=True)]
    mean = statistics.fmean(logs)
    half = _QUANTILES[rounds] * statistics.stdev(logs) / math.sqrt(rounds)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


@dataclass(frozen=True)
class Verdict:
    """The order of contenders after some rounds.

    Attributes:
        fastest: index of the contender with the least geometric mean.
        winner: index of the simplest contender that ties with the fastest: it is equally fast, or
            the rounds leave the order open and it took at most :data:`TOLERANCE` longer.
        ratios: for each contender still in the race, its time relative to the fastest.
        settled: whether more rounds cannot change much: each of the others is slower than the
            fastest, or equally fast.
    """

    fastest: int
    winner: int
    ratios: Mapping[int, Ratio]
    settled: bool

    @property
    def remaining(self) -> tuple[int, ...]:
        """The contenders that are not known to be slower than the fastest, simplest first."""
        return tuple(i for i, of in self.ratios.items() if of.order != "slower")


def judge(times: Mapping[int, Sequence[float]]) -> Verdict:
    """Judge contenders by their times in each round.

    Args:
        times: seconds in each round by contender, of at most :data:`MOST_CONTENDERS`; a lower index
            means a simpler contender. All have the same number of rounds, one of :data:`LOOKS`.

    Raises:
        ValueError: there are no contenders or too many, or the number of rounds is not one of
            :data:`LOOKS`.
    """
    if not 1 <= len(times) <= MOST_CONTENDERS:
        raise ValueError(f"times: {len(times)} contenders; valid: 1 to {MOST_CONTENDERS}")
    fastest = min(times, key=lambda index: sum(map(math.log, times[index])))
    ratios = {index: ratio(times[index], times[fastest]) for index in sorted(times)}
    others = [of for index, of in ratios.items() if index != fastest]
    winner = min(i for i, of in ratios.items() if i == fastest or _ties(of))
    return Verdict(fastest, winner, ratios, all(of.order != "open" for of in others))


def _ties(ratio: Ratio) -> bool:
    return ratio.order == "equal" or (ratio.order == "open" and ratio.ratio <= 1 + TOLERANCE)
