"""The recipe's ``gradient_noise_every``: steps that measure the gradient noise scale."""

from __future__ import annotations

from torch import nn

from ....amp import Precision
from ....lars import GradientNoise, Span
from ...errors import RecipeError
from ..timeline import Timeline

_KEY = "gradient_noise_every"


class NoiseMeter:
    """Measures the gradient noise scale in some steps of a run.

    Between them it changes nothing. A resumed run starts to measure anew.

    Args:
        model: The model.
        precision: Its precision, whose loss scale the gradients have.
        timeline: Steps and epochs of the run.
        every: Interval between the steps.
    """

    def __init__(
        self, model: nn.Module, precision: Precision, timeline: Timeline, every: Span
    ) -> None:
        self._precision, self._timeline, self._every = precision, timeline, every
        self._noise = GradientNoise(model.parameters(), 1)
        self._noise.watch(False)

    def begin_step(self, step: int, micro_batch_size: int) -> None:
        """Begin a step of training.

        Args:
            step: Its number, from 1.
            micro_batch_size: Images of each of its backward passes on one rank.
        """
        self._noise.watch(self._timeline.due(self._every, step))
        self._noise.batch_size = micro_batch_size

    def gradients_ready(self) -> None:
        """Measure the gradients of the step, after its last backward pass and before clipping."""
        self._noise.step(self._precision.loss_scale_on_device)

    def values(self) -> dict[str, float]:
        """Return the metrics of the last measured steps; waits for the device, and a collective.

        Returns:
            ``noise_scale`` and its standard error ``noise_scale_error``, in images. NaN where they
            are not determined; empty before the first measured step.
        """
        found = self._noise.estimate()
        if not found.steps + found.left_out:
            return {}
        return {"noise_scale": found.noise_scale, "noise_scale_error": found.standard_error}


def check_measurable(every: Span, timeline: Timeline, last_step: int) -> None:
    """Check that the gradient noise scale can be measured.

    Raises:
        RecipeError: No step is measured, or a step has a single backward pass.
    """
    ranks = timeline.world_size
    if timeline.steps(every) > last_step:
        raise RecipeError(f"{_KEY}: {every} is longer than the run, {last_step} steps")
    for phase, first in zip(timeline.phases, timeline.first_steps, strict=False):
        if first < last_step and phase.accumulation(ranks) * ranks < 2:
            raise RecipeError(
                f"{_KEY}: a batch of {phase.batch_size} images is one backward pass, with no "
                f"smaller batch to compare it with; valid: a micro_batch_size of at most "
                f"{max(1, phase.batch_size // 2)}, or null"
            )
