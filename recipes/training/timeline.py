"""The course of a run: how its updates, epochs and images go together.

An epoch is a number of images. Where stages change the batch, the number of updates in an epoch
changes with it, so whatever a recipe counts in epochs or in fractions of the run goes through
images, here and nowhere else.

What a stage does to the learning rate is one of
- keep: the batch grows where the rate would have fallen (Smith et al. 2018, arXiv 1711.00489);
- linear, sqrt: the rate follows the batch, as with ``scale`` from one recipe to another. Smith et
  al. also grow both in proportion; Mikami et al. 2018 (arXiv 1811.05233) grow the batch
  in stages.

Momentum needs nothing more at a change of batch than at any change of rate: gradients are means
over the global batch. With the rate outside the momentum buffer (``sgd``, LARS dialects ``torch``
and ``larc``) the new rate holds for the whole buffer at once; inside it (``mlperf``) the steps
already taken up keep the old one, unless they are corrected (``mlperf-corrected``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from ...lars import Span
from ...pipeline import Stage
from ...pipeline.stages import Phase, lay_out, until
from ..errors import RecipeError
from ..schema.recipe import Recipe


@dataclass(frozen=True)
class Timeline:
    """Where a run stands after each of its updates. Past its end, the last stage goes on.

    Attributes:
        images: in an epoch.
        stages: as the loader takes them.
        phases: stretches of the stream of images with batches of one size, from the start on.
        factors: what the scheduled learning rate is multiplied by in each of them.
        end: images given out in the whole run.
    """

    images: int
    stages: tuple[Stage, ...]
    phases: tuple[Phase, ...]
    factors: tuple[float, ...]
    end: int

    @cached_property
    def _first_steps(self) -> tuple[int, ...]:
        """Updates made before each phase."""
        steps = [0]
        for phase, following in zip(self.phases, self.phases[1:], strict=False):
            steps.append(steps[-1] + (following.start - phase.start) // phase.batch_size)
        return tuple(steps)

    @cached_property
    def total_steps(self) -> int:
        """Updates of the whole run."""
        last = self.phases[-1]
        return self._first_steps[-1] + (self.end - last.start) // last.batch_size

    @cached_property
    def unit(self) -> int:
        """Images that every batch is a multiple of: the batch itself, where it does not change."""
        return math.gcd(*(phase.batch_size for phase in self.phases))

    @property
    def steps_per_epoch(self) -> float:
        """Updates in an epoch, at the start of the run."""
        return self.images / self.phases[0].batch_size

    @property
    def changes(self) -> tuple[int, ...]:
        """The updates before which the batch changes."""
        steps = dict.fromkeys(s for s in self._first_steps if 0 < s < self.total_steps)
        return tuple(s for s in steps if self.batch_size(s) != self.batch_size(s - 1))

    @property
    def changes_batch(self) -> bool:
        """Whether batches have more than one size."""
        return bool(self.changes)

    def _phase(self, step: int) -> int:
        """The phase of the update that follows ``step`` of them."""
        return max(0, bisect_right(self._first_steps, step) - 1)

    def batch_size(self, step: int) -> int:
        """The global batch of the update that follows ``step`` of them."""
        return self.phases[self._phase(step)].batch_size

    def factor(self, step: int) -> float:
        """What the scheduled rate is multiplied by in the update that follows ``step`` of them."""
        return self.factors[self._phase(step)]

    def position(self, step: int) -> int:
        """Images given out by the first ``step`` updates."""
        index = self._phase(step)
        phase = self.phases[index]
        return phase.start + (step - self._first_steps[index]) * phase.batch_size

    def progress(self, step: int) -> int:
        """``position`` in units of :attr:`unit`; where the batch does not change, the step."""
        return self.position(step) // self.unit

    def epoch(self, step: int) -> float:
        """Epochs of images given out by the first ``step`` updates."""
        return self.position(step) / self.images

    def steps(self, span: Span, after: int = 0) -> int:
        """The updates that a length takes from update ``after`` on, rounded to the nearest."""
        if not span.unit:
            return round(span.value)
        whole = self.images if span.unit == "ep" else self.end
        left, step = span.value, after
        index = self._phase(after)
        for phase, ends in zip(self.phases[index:], self._first_steps[index + 1 :], strict=False):
            per_unit = whole / phase.batch_size
            if left * per_unit <= ends - step:
                return step - after + round(left * per_unit)
            left, step = left - (ends - step) / per_unit, ends
        return step - after + round(left * (whole / self.phases[-1].batch_size))

    def due(self, every: Span, step: int) -> bool:
        """Whether ``step`` is the first at or past a multiple of ``every``, which is not 0."""
        if every.unit:
            period = every.value * (self.images if every.unit == "ep" else self.end)
            now, before = self.position(step) / period, self.position(step - 1) / period
        else:
            now, before = step / every.value, (step - 1) / every.value
        return math.floor(now + 1e-9) > math.floor(before + 1e-9)

    def last_step(self, recipe: Recipe) -> int:
        """The update to stop after.

        Raises:
            RecipeError: there would be none.
        """
        if recipe.stop_after is None:
            return self.total_steps
        last = min(self.total_steps, self.steps(recipe.stop_after))
        if last < 1:
            raise RecipeError(f"stop_after: {recipe.stop_after} is less than one step")
        return last


def timeline_of(recipe: Recipe, images: int) -> Timeline:
    """The course of a recipe on ``images`` training images.

    Raises:
        RecipeError: the run has no update, or its stages are not in order.
    """
    batch, micro = recipe.batch_size, recipe.micro_batch_size
    phases: tuple[Phase, ...] = (Phase(0, recipe.data.image_size, batch, micro or batch),)
    stages: list[Stage] = []
    factors = [1.0]
    for index, stage in enumerate(recipe.stages):
        span = stage.from_
        if span.unit:
            epoch = span.value * (recipe.epochs if span.unit == "dur" else 1)
        else:
            so_far = Timeline(images, (), phases, tuple(factors), 0)
            epoch = so_far.epoch(round(span.value))
        if stages and epoch <= stages[-1].from_epoch:
            raise RecipeError(
                f"stages.{index}.from: {span} does not come after {recipe.stages[index - 1].from_}"
                "; valid: stages in order"
            )
        ratio = (stage.batch_size or batch) / batch
        scales = {"linear": ratio, "sqrt": math.sqrt(ratio)}
        factors.append(factors[-1] * scales.get(stage.lr or "keep", 1.0))
        batch, micro = stage.batch_size or batch, stage.micro_batch_size or micro
        stages.append(Stage(epoch, stage.image_size, stage.batch_size, micro))
        phases = lay_out(phases[0], stages, images=images, world_size=1)
    phases, end = until(phases, recipe.epochs, images)
    found = Timeline(images, tuple(stages), phases, tuple(factors[: len(phases)]), end)
    if found.total_steps < 1:
        raise RecipeError(
            f"epochs: {recipe.epochs:g} are less than one batch; an epoch is "
            f"{found.steps_per_epoch:.3g} steps"
        )
    return found
