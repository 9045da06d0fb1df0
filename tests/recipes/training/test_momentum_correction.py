"""Momentum correction (Goyal et al. 2017, section 3, remark 2) in a run, by optimizer.dialect."""

import pytest

from tests.recipes.runs import NO_BATCH_NORM, ROUNDING, double_precision, largest_difference, train

pytestmark = pytest.mark.slow("trains a small network in five ways")

# The rate rises, doubles with the batch, and falls. It is never 0, where there is no correction.
CHANGING = [
    "optimizer.lr=2",
    "schedule.start=0.5",
    "stages=[{from: 4, batch_size: 32, lr: linear}]",
    "epochs=3",
]


def test_the_corrected_dialect_takes_the_steps_of_a_rate_outside_the_buffer(photos, tmp_path):
    keys = [*NO_BATCH_NORM, *CHANGING]
    with double_precision():
        outside, corrected, inside = (
            train(photos, tmp_path / dialect, *keys, f"optimizer.dialect={dialect}")
            for dialect in ("torch", "mlperf-corrected", "mlperf")
        )
    assert largest_difference(corrected, outside) < ROUNDING
    assert largest_difference(inside, outside) > 0.1
