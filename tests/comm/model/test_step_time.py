"""The line of a step's time, and the wait for the slowest rank."""

import pytest
import torch

from largebatch.comm import StepTime, straggler_slowdown


def test_a_line_goes_through_both_steps_in_any_order():
    line = StepTime.through((256, 0.098), (64, 0.0315))
    assert line == StepTime.through((64, 0.0315), (256, 0.098))
    assert (line.seconds(64), line.seconds(256)) == pytest.approx((0.0315, 0.098))
    at = StepTime.at(256, 256 / 0.098, line.fixed_seconds)
    assert at.seconds_per_image == pytest.approx(line.seconds_per_image)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepTime.through((8, 1.0), (8, 2.0)), "images: 8 twice"),
        (lambda: StepTime.through((8, 1.0), (16, 2.5)), "fixed_seconds: -0.5 is no time"),
        (lambda: StepTime.through((8, 1.0), (16, 0.5)), "seconds_per_image: -0.0625 is no time"),
        (lambda: StepTime.at(8, 80.0, 0.1), "fixed_seconds: 0.1 is no part of a step of 0.1 s"),
        (lambda: straggler_slowdown(8, -0.1), "sigma: -0.1 is no standard deviation"),
    ],
)
def test_impossible_times_are_refused(make, message):
    with pytest.raises(ValueError, match=f"{message}.*; valid: "):
        make()


@pytest.mark.parametrize("ranks", [8, 1024])
def test_the_wait_is_that_for_the_largest_of_normal_times(ranks):
    """sqrt(2 ln p) bounds the expected largest of p standard normal numbers, from above."""
    generator = torch.Generator().manual_seed(0)
    largest = torch.randn(4000, ranks, generator=generator).amax(1).mean().item()
    bound = straggler_slowdown(ranks, 1.0) - 1
    assert largest < bound < 1.5 * largest
    assert straggler_slowdown(1, 1.0) == 1
