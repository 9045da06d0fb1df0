"""Which readings are no better than guessing."""

import math

import pytest

from largebatch.recipes.tune.learning_rate.watch import FAR, Guessing
from largebatch.recipes.tune.runs import Reading


@pytest.mark.parametrize(
    ("classes", "loss", "top1", "times", "hopeless"),
    [
        (10, 2.4, 12.0, 1.0, True),
        (10, 2.2, 12.0, 1.0, False),
        (10, 2.4, 25.0, 1.0, False),
        (10, 2.4, 12.0, FAR, False),
        (10, math.nan, 12.0, FAR, True),
        (1000, 7.0, 0.15, 1.0, True),
        # Few classes: right nine times of ten, and sure of its errors.
        (2, 0.9, 90.0, 1.0, False),
        (3, 1.2, 60.0, 1.0, False),
        (2, 0.9, 55.0, 1.0, True),
    ],
)
def test_guessing_is_better_in_loss_and_nearly_in_accuracy(classes, loss, top1, times, hopeless):
    assert Guessing(classes).is_better(Reading(1, 1.0, loss, top1), times) == hopeless
