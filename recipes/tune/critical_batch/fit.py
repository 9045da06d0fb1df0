"""Fit the epochs of a batch to a given loss: E(B) = E0 (1 + B / B_crit).

The form follows from the noise of gradients (McCandlish et al. 2018, arXiv 1812.06162, equation
2.11); MLPerf's reference points of ResNet-50 obey it within 7 %. It says that the loss of a run
depends on its batch B and its epochs N only by its *effective epochs*, N / (1 + B / B_crit). Thus
runs of any batches and lengths determine B_crit together: it is the value at which their losses lie
on one curve. A run need not end at the target, and the target need not be known.

The interval is that of the profile likelihood: those B_crit whose sum of squared residuals is not
significantly larger than the least one, by the F distribution. It holds what the model does not
explain as well as the noise of the runs, but not what changes beyond the largest batch: there, a
learning rate that follows a rule may stop to work before the law does.

A step of LARS has a length that does not depend on the size of the gradient. If its rate grows with
the root of the batch and nothing else limits it, epochs grow less: E(B) = E0 sqrt(1 + B / B_crit).
Where the rate follows by the root, intervals of epochs reach to that form's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...errors import RecipeError

#: Probability that the interval holds the critical batch, if the model is right.
CONFIDENCE = 0.9
#: Ratio of the interval's ends above which the critical batch counts as not determined.
WIDEST = 4.0

_POINTS = 1401  # of the grid over the critical batch, about 1 % apart


@dataclass(frozen=True)
class CriticalBatch:
    """A critical batch with its interval, and the batches that it was estimated from."""

    batch_size: float  # in images; infinite if larger batches cost nothing
    low: float
    high: float  # may be infinite
    smallest: int
    largest: int
    exponent: float = 1.0  # of 1 + B / B_crit in the law
    #: The fit with the exponent 1/2, where the rate follows the batch by the square root.
    by_root: CriticalBatch | None = None

    @property
    def determined(self) -> bool:
        """Whether the ends of the interval are at most a factor of :data:`WIDEST` apart."""
        return math.isfinite(self.high) and self.high <= WIDEST * self.low

    def factor(self, batch_size: float, than: float) -> tuple[float, float, float]:
        """E(batch_size) / E(than) with the ends of its interval, which also holds by_root's."""
        estimate, *ends = (
            _ratio(batch_size, than, critical) ** self.exponent
            for critical in (self.batch_size, self.low, self.high)
        )
        if self.by_root:
            ends += self.by_root.factor(batch_size, than)
        return estimate, min(ends), max(ends)


def _ratio(batch_size: float, than: float, critical: float) -> float:
    """E(batch_size) / E(than) with this critical batch; the limit where it is 0."""
    if critical == 0:
        return batch_size / than
    return (1 + batch_size / critical) / (1 + than / critical)


#: A run's batch size, epochs, and training loss near its end above the lowest that is possible.
Observation = tuple[int, float, float]


def fit_losses(
    observations: Sequence[Observation], rule: str = "linear", exponent: float = 1.0
) -> CriticalBatch:
    """Fit the critical batch to losses of runs whose rate followed the batch by ``rule``."""
    usable = [one for one in observations if 0 < one[2] < math.inf]
    if (batches := len({batch for batch, *_ in usable})) < 2:
        raise RecipeError(
            f"--batches: runs of {batches} batch sizes ended with a finite loss; valid: at least 2"
        )
    sizes, epochs, loss = np.array(usable, dtype=float).T
    log_epochs, log_loss = np.log(epochs), np.log(loss)
    degree = 2 if len(usable) >= 6 and len({*log_epochs.round(6)}) >= 3 else 1
    freedom = len(usable) - degree - 2
    if freedom < 1:
        raise RecipeError(
            f"--epochs: {len(usable)} runs do not determine {degree + 2} values; give "
            "more lengths (--epochs) or batches (--batches)"
        )

    def residuals(critical: NDArray[np.float64]) -> NDArray[np.float64]:
        x = log_epochs - exponent * np.log1p(sizes / critical[:, None])
        centred = x - x.mean(axis=1, keepdims=True)
        basis, _ = np.linalg.qr(centred[..., None] ** np.arange(degree + 1))
        found: NDArray[np.float64] = log_loss - (basis @ (basis.mT @ log_loss[:, None]))[..., 0]
        return found

    fitted = replace(profile(residuals, sizes, freedom), exponent=exponent)
    if rule == "sqrt":
        fitted = replace(fitted, by_root=fit_losses(observations, exponent=0.5))
    x = log_epochs - exponent * np.log1p(sizes / fitted.batch_size)
    if np.polyfit(x, log_loss, 1)[0] >= 0:
        raise RecipeError(
            "--epochs: the loss does not fall with the epochs of these runs; valid: longer runs, "
            "or another learning rate"
        )
    return fitted


def profile(
    residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    sizes: NDArray[np.float64],
    freedom: int,
) -> CriticalBatch:
    """The critical batch of least squares, with the interval of its profile likelihood."""
    from scipy.stats import f

    low, high = float(sizes.min()) / 1e2, float(sizes.max()) * 1e4
    grid = np.append(np.geomspace(low, high, _POINTS), math.inf)
    squares = (residuals(grid) ** 2).sum(axis=1)
    least = int(squares.argmin())
    bound = squares[least] * (1 + float(f.ppf(CONFIDENCE, 1, freedom)) / freedom)
    inside = np.flatnonzero(squares <= max(bound, squares[least]))
    return CriticalBatch(
        batch_size=float(grid[least]),
        low=float(grid[inside[0]]) if inside[0] else 0.0,
        high=float(grid[inside[-1]]),
        smallest=int(sizes.min()),
        largest=int(sizes.max()),
    )
