"""The time of a training step without communication: a line in the images, and stragglers.

A step of ``n`` images takes ``t0 + n / rate`` on one rank; the first term does not shrink with the
images. A step of ``p`` ranks ends with the slowest: if the ranks' times vary independently and
normally with a relative standard deviation ``sigma``, the largest of ``p`` is on average at most
``1 + sigma * sqrt(2 ln p)`` times the mean. That bound is taken as the prediction, and the
constants are fitted with it. It is close on many ranks alone: the standard normal maximum of 2 is
0.56 on average and its bound 1.18; of 1,024 they are 3.25 and 3.72.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def straggler_slowdown(ranks: int, sigma: float) -> float:
    """Return an upper bound of the slowest rank's expected time, relative to the ranks' mean.

    ``sigma`` is the relative standard deviation of a rank's time; ValueError if it is negative.
    """
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"sigma: {sigma} is no standard deviation; valid: finite, 0 or more")
    return 1 + sigma * math.sqrt(2 * math.log(ranks))


@dataclass(frozen=True)
class StepTime:
    """The time of a step on one rank as a line in the images; ValueError for an impossible one."""

    fixed_seconds: float  #: t0, the time that does not depend on the images.
    seconds_per_image: float  #: The time that each further image takes.

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fixed_seconds) and self.fixed_seconds >= 0):
            raise ValueError(
                f"fixed_seconds: {self.fixed_seconds} is no time of a step; valid: 0 or more"
            )
        if not (math.isfinite(self.seconds_per_image) and self.seconds_per_image > 0):
            raise ValueError(
                f"seconds_per_image: {self.seconds_per_image} is no time of an image; valid: above "
                "0"
            )

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> StepTime:
        """Fit the line to two measured steps, each a number of images and seconds."""
        (images, seconds), (others, longer) = sorted((first, second))
        if images == others:
            raise ValueError(f"images: {images:g} twice; valid: two different batch sizes")
        slope = (longer - seconds) / (others - images)
        return cls(seconds - images * slope, slope)

    @classmethod
    def at(cls, images: float, images_per_second: float, fixed_seconds: float = 0.0) -> StepTime:
        """Return the line with a known fixed time through a throughput at ``images`` per step."""
        seconds = images / images_per_second
        if fixed_seconds >= seconds:
            raise ValueError(
                f"fixed_seconds: {fixed_seconds:g} is no part of a step of {seconds:g} s; valid: "
                "shorter than the step"
            )
        return cls(fixed_seconds, (seconds - fixed_seconds) / images)

    def seconds(self, images: float) -> float:
        """Return the time of a step of ``images``, in seconds."""
        return self.fixed_seconds + images * self.seconds_per_image
