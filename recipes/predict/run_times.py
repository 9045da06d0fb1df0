"""The time of a whole run: its steps, evaluations and checkpoints on a number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...comm import Plan, simulate, straggler_slowdown
from ..errors import RecipeError
from ..schema.recipe import Recipe
from ..training.timeline import Timeline
from .assumptions import Rates
from .scaling import Setting


@dataclass(frozen=True)
class Times:
    """How long a run takes, in seconds.

    Attributes:
        step_seconds: A step of the first stage.
        efficiency: Throughput per GPU in training relative to a single GPU, from 0 to 1.
        compute: Training without communication.
        exposed: Communication that backward does not hide.
        waiting: Waiting for the slowest GPU.
        evaluation: All evaluations.
        checkpoints: All checkpoints.
    """

    step_seconds: float
    efficiency: float
    compute: float
    exposed: float
    waiting: float
    evaluation: float
    checkpoints: float

    @property
    def total(self) -> float:
        """Time to train."""
        return self.compute + self.exposed + self.waiting + self.evaluation + self.checkpoints


@dataclass(frozen=True)
class Run:
    """A run on a number of GPUs, without its rates.

    Attributes:
        recipe: The recipe.
        timeline: Its steps on these GPUs.
        common: The step on one GPU, and the links.
        plan: How gradients are reduced; None on one GPU.
        validation: Number of images of an evaluation.
        checkpoint_bytes: Size of a checkpoint.
    """

    recipe: Recipe
    timeline: Timeline
    common: Setting
    plan: Plan | None
    validation: int
    checkpoint_bytes: int

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.timeline.world_size

    def counts(self) -> tuple[int, int]:
        """Return the number of evaluations and of checkpoints, those at the end included."""
        recipe, times_due = self.recipe, self.timeline.times_due
        last = self.timeline.last_step(recipe)
        evaluated = recipe.evaluate_every if self.validation else None
        saved = recipe.checkpoint.every
        return (
            1 + times_due(evaluated, 0, last - 1) if evaluated else 0,
            1 + (times_due(saved, 0, last - 1) if saved else 0),
        )

    def times(self, rates: Rates, counts: tuple[int, int]) -> Times:
        """Predict the times of the run.

        Args:
            rates: The inputs that may be varied.
            counts: Of :meth:`counts`.

        Raises:
            RecipeError: A link has no rate.
        """
        compute = training = waiting = first = 0.0
        for number, seconds, alone, waited in self._steps(rates):
            first = first or seconds
            training += number * seconds
            compute += number * alone
            waiting += number * waited
        evaluations, checkpoints = counts
        recipe = self.recipe
        weights = 1 if recipe.ema.decay is None else 2
        micro = self.timeline.phases[-1].micro_batch_size
        batches = math.ceil(self.validation / (micro * self.gpus))
        pixels = (recipe.eval_size / recipe.data.image_size) ** 2
        evaluation = rates.evaluation_start_seconds
        evaluation += batches * micro * pixels / rates.evaluation_images_per_second
        checkpoint = rates.checkpoint_start_seconds
        checkpoint += self.checkpoint_bytes / rates.checkpoint_bytes_per_second
        return Times(
            first,
            compute / training,
            compute,
            training - compute - waiting,
            waiting,
            evaluations * weights * evaluation,
            checkpoints * checkpoint,
        )

    def total(self, rates: Rates, counts: tuple[int, int]) -> float:
        """Return the time to train, in seconds; see :meth:`times`."""
        return self.times(rates, counts).total

    def alone(self, images: float, rates: Rates) -> float:
        """Time of a micro-batch of ``images`` of the recipe's size on one GPU, in seconds."""
        line = self.common.step
        line = replace(line, fixed_seconds=line.fixed_seconds * rates.fixed)
        return line.seconds(images) * self.common.images_per_second / rates.images_per_second

    def _steps(self, rates: Rates) -> Iterator[tuple[int, float, float, float]]:
        """For each stage: the number of its steps, then seconds of one of them.

        These are its time, that on one GPU, and what of it is waiting for the slowest GPU.
        """
        timeline = self.timeline
        last = timeline.last_step(self.recipe)
        ends = [*timeline.first_steps[1:], last]
        for phase, start, end in zip(timeline.phases, timeline.first_steps, ends, strict=True):
            # Other image sizes take time by their pixels.
            pixels = (phase.image_size / self.recipe.data.image_size) ** 2
            one = self.alone(phase.micro_batch_size * pixels, rates)
            before = (phase.accumulation(self.gpus) - 1) * one  # of which nothing is reduced
            late = straggler_slowdown(self.gpus, rates.straggler_sigma) - 1
            reduced = self.reduced(one, rates)
            number = max(0, min(end, last) - min(start, last))
            waited = late * (before + one)
            step = before * (1 + late) + reduced
            if self.plan is not None:
                step /= rates.kept
            yield number, step, before + one, waited

    def reduced(self, compute_seconds: float, rates: Rates, plan: Plan | None = None) -> float:
        """Time of the last micro-batch of a step, whose backward pass reduces the gradients.

        Args:
            compute_seconds: Its time without communication.
            rates: The inputs that may be varied.
            plan: In place of the run's own.

        Raises:
            RecipeError: A link has no rate.
        """
        plan = plan or self.plan
        if plan is None:
            return compute_seconds
        profile = self.common.profile.scaled(compute_seconds)
        nccl = self.common.nccl
        cluster = self.common.cluster(
            self.gpus, nccl and rates.nccl(nccl), rates.links(self.common.links)
        )
        cluster = replace(cluster, straggler_sigma=rates.straggler_sigma)
        try:
            return simulate(profile, cluster, plan).step_seconds
        except ValueError as error:
            raise RecipeError(f"--links: {error}") from None
