"""The fit of the critical batch, on curves that obey its law and on MLPerf's published points."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.tune.critical_batch.fit import fit_losses, profile

#: Batch size and mean epochs to 75.9 % of MLPerf's reference convergence points of ResNet-50
#: (mlcommons/logging, rcp_checker/training_1.0.0 to 4.0.0).
MLPERF = [
    *((1632, 35.0), (3264, 35.2), (4096, 40.0), (8192, 42.0), (13056, 45.4)),
    *((32768, 56.0), (49152, 68.0), (58880, 79.9), (65536, 84.5), (67840, 85.9)),
]


def losses(critical, batches=(64, 128, 256), lengths=(4, 8, 16), spread=0.0, seed=0):
    """Losses by a power law of effective epochs, with relative noise."""
    noise = random.Random(seed)
    factors = ((b, n, noise.lognormvariate(0, spread)) for b in batches for n in lengths)
    return [(b, n, 3 * (n / (1 + b / critical)) ** -0.6 * of) for b, n, of in factors]


def fit_epochs(points):
    """Fit the critical batch to pairs of batch size and epochs to one target."""
    sizes, epochs = np.array(points, dtype=float).T

    def residuals(critical):
        x = np.log(epochs) - np.log1p(sizes / critical[:, None])
        return x - x.mean(axis=1, keepdims=True)

    return profile(residuals, sizes, len(points) - 2)


@settings(max_examples=15)
@given(critical=st.floats(20, 5000), degree=st.sampled_from([(4, 16), (4, 8, 16)]))
def test_an_exact_law_is_found(critical, degree):
    diverged = (512, 8, math.nan)  # is left out
    found = fit_losses([*losses(critical, lengths=degree), diverged])
    assert found.batch_size == pytest.approx(critical, rel=0.01)
    assert found.determined
    assert found.factor(1024, 256)[0] == pytest.approx(
        (1 + 1024 / critical) / (1 + 256 / critical), rel=0.01
    )


def test_batches_that_cost_nothing_or_only_save_updates_have_one_end():
    found = fit_losses(losses(math.inf, spread=0.001))
    assert (found.high, found.determined) == (math.inf, False)
    low, high = found.factor(512, 256)[1:]
    assert 1 == low <= high < 1.1
    found = fit_losses(losses(1e-3, batches=(1000, 2000, 4000), spread=0.001))
    assert (found.low, found.factor(8000, 4000)[2]) == (0, 2.0)


def test_mlperf_obeys_the_law_and_is_predicted_from_smaller_batches():
    """One doubling within 7 %; five times the batch with the errors that REFERENCE states."""
    found = fit_epochs(MLPERF)
    assert found.determined
    assert found.low < 46_900 < found.high
    assert found.batch_size == pytest.approx(46_900, rel=0.01)
    for largest, error in ((33_000, 0.07), (14_000, 0.18)):
        known = [point for point in MLPERF if point[0] <= largest]
        found = fit_epochs(known)
        at_known = [math.log(n / found.factor(b, known[0][0])[0]) for b, n in known]
        first = math.exp(sum(at_known) / len(at_known))
        for batch, epochs in MLPERF[len(known) :]:
            factor, low, high = found.factor(batch, known[0][0])
            assert first * factor == pytest.approx(epochs, rel=error)
            assert low < factor < high
            assert first * factor > epochs or largest == 33_000


def test_runs_that_do_not_suffice_are_refused():
    for observations, message in (
        (losses(300, batches=(64,)), "--batches: runs of 1 batch sizes"),
        (losses(300, batches=(64, 128), lengths=(4,)), "--epochs: 2 runs do not determine"),
    ):
        with pytest.raises(RecipeError, match=message):
            fit_losses(observations)


def test_intervals_of_epochs_reach_to_the_law_of_steps_of_a_fixed_length():
    """With a rate by the square root, epochs may grow with the root of 1 + B / B_crit."""
    seen = losses(200, spread=0.02)
    linear, root = fit_losses(seen), fit_losses(seen, "sqrt")
    assert (root.batch_size, root.low, root.high) == (linear.batch_size, linear.low, linear.high)
    factor, low, high = root.factor(1024, 64)
    assert factor == linear.factor(1024, 64)[0]
    assert (low, high) == (root.by_root.factor(1024, 64)[1], linear.factor(1024, 64)[2])
    assert low < linear.factor(1024, 64)[1]
