"""The plan of a run: steps, memory, time and cost of a recipe on several numbers of GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...comm import Plan, straggler_slowdown
from ...pipeline import Phase, without_query
from ..models.batch_norm import check_batch_norm
from ..schema.load import Loaded
from ..schema.recipe import Recipe
from ..training.build import build_plan
from ..training.data import is_url, open_split
from ..training.timeline import Timeline, timeline_of
from .division import fit
from .memory import Memory, MemoryCounter
from .presets import PUBLISHED_RUNS, STRAGGLER_SIGMA
from .scaling import Setting, setting
from .schedule import image_count
from .speed import gpu_named

_IMAGENET = (1_281_167, 50_000)


#: A backward pass multiplies by the weights twice, a forward pass once.
_EVALUATION_SPEED = 3.0
_CHECKPOINT_BYTES_PER_SECOND = 1e9
_START_SECONDS = 0.5  # of an evaluation and of a checkpoint


class Rates(NamedTuple):
    """Factors on a GPU's throughput, on that predicted of several, and on the time besides."""

    speed: float = 1.0
    kept: float = 1.0
    besides: float = 1.0


@dataclass(frozen=True)
class Times:
    """Seconds of a step of the first stage, and of all steps, evaluations and checkpoints."""

    step: float
    training: float
    evaluation: float
    checkpoints: float

    @property
    def total(self) -> float:
        """Time to train."""
        return self.training + self.evaluation + self.checkpoints


@dataclass(frozen=True)
class Assumption:
    """An input, what else it might be, and the time to train with that, in seconds."""

    name: str
    otherwise: str
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    """The plan for one number of GPUs."""

    gpus: int
    recipe: Recipe  # with the micro-batches that divide on them
    timeline: Timeline
    batch_norm_images: int | None  # over which it takes statistics; None without batch norm
    reduced_bytes: int  # of the gradients that each step reduces; 0 on one GPU
    memory: Memory  # per GPU, in the recipe's precision
    times: Times
    efficiency: float  # throughput per GPU relative to the best measured batch, from 0 to 1
    input_per_node: float  # images per second that each node must read and decode
    assumptions: tuple[Assumption, ...]  # the one that changes most first
    cost: float | None  # price of the run; None without a price
    notices: tuple[str, ...]  # what must change, or is worth a look

    @property
    def micro_batch_size(self) -> int:
        """Images of a forward pass in the first stage."""
        return self.timeline.phases[0].micro_batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of a GPU in each step of the first stage."""
        return self.timeline.phases[0].accumulation(self.gpus)

    @property
    def images_per_second(self) -> float:
        """Throughput of training of all GPUs in the first stage."""
        return self.recipe.batch_size / self.times.step

    @property
    def between(self) -> tuple[float, float]:
        """Shortest and longest time to train, in seconds, if all assumptions may be otherwise."""
        total = self.times.total  # independent: logarithms of what each changes add as squares
        shorter = math.hypot(*(math.log(one.low / total) for one in self.assumptions))
        longer = math.hypot(*(math.log(one.high / total) for one in self.assumptions))
        return total * math.exp(-shorter), total * math.exp(longer)


@dataclass(frozen=True)
class RunPlan:
    """The plans for all numbers of GPUs, and what they share; ``inputs`` have their sources."""

    name: str
    gpu: str | None
    precision: str
    epochs: float
    steps: int
    evaluations: int
    checkpoints: int
    relative_to: str
    inputs: tuple[str, ...]
    points: tuple[Point, ...]


def plan_run(
    loaded: Loaded, gpus: Sequence[int], *, price: float | None = None, **options: Any
) -> RunPlan:
    """Plan a run on ascending numbers of GPUs, at a price per GPU and hour."""
    recipe, preset = loaded.recipe, gpu_named(options.get("gpu"))
    classes, validation, source = _data(recipe)
    images, where = image_count(recipe)
    data = recipe.data.model_copy(update={"classes": classes})
    recipe = recipe.model_copy(update={"data": data})
    fitting = [fit(recipe, n) for n in gpus]
    micro = fitting[0][0].micro_batch_size or recipe.batch_size // gpus[0]
    counter = MemoryCounter(recipe, classes)
    common = setting(
        replace(loaded, recipe=recipe), images_per_gpu=micro, alone=gpus[-1] == 1, **options
    )
    precision = "fp32" if recipe.precision == "auto" else recipe.precision  # that needs more
    points = []
    for (fitted, notices), n in zip(fitting, gpus, strict=True):
        timeline = timeline_of(fitted, images, n)
        check_batch_norm(fitted, counter.model, timeline.phases, n)
        run = _Run(fitted, timeline, common, validation, counter.checkpoint_bytes(precision, n))
        times = run.times(Rates())
        each_stage = (
            counter.count(
                *(precision, phase.micro_batch_size, phase.image_size),
                ranks=n,
                accumulation=phase.accumulation(n),
            )
            for phase in timeline.phases
        )
        memory = max(each_stage, key=lambda memory: memory.peak)
        if preset and memory.peak > 1e9 * preset.memory_gb:
            notices += (
                f"{n:,} GPUs: {memory.peak / 1e9:.1f} GB with micro_batch_size="
                f"{memory.micro_batch_size} do not fit into {preset.memory_gb:g} GB; a smaller one "
                "does the same steps, with batch norm over fewer images",
            )
        for phase in timeline.phases:
            notices += common.warnings(phase.micro_batch_size)
        each = fitted.batch_size / times.step / n
        efficiency = common.efficiency(each * run.pixels(timeline.phases[0].image_size))
        points.append(
            Point(
                n,
                fitted,
                timeline,
                _statistics(fitted, counter.model, timeline, n),
                0 if n == 1 else counter.gradient_bytes(precision),
                memory,
                times,
                efficiency,
                each * min(n, common.gpus_per_node),
                run.assumptions(efficiency),
                None if price is None else price * n * times.total / 3600,
                notices,
            )
        )
    timeline = points[0].timeline
    last = timeline.last_step(recipe)
    return RunPlan(
        loaded.name,
        options.get("gpu"),
        precision,
        timeline.epoch(last),
        last,
        *run.counts(),  # which do not depend on the number of GPUs
        str(common.speed.best),
        (
            f"{images:,} training images ({where}), {validation:,} to evaluate ({source})",
            *common.inputs,
            f"evaluation at {_EVALUATION_SPEED:g} times the speed of training, checkpoints at "
            f"{_CHECKPOINT_BYTES_PER_SECOND / 1e9:g} GB/s, {_START_SECONDS:g} s to start (assumed)",
        ),
        tuple(points),
    )


@dataclass
class _Run:
    """A run on a number of GPUs."""

    recipe: Recipe
    timeline: Timeline
    common: Setting
    validation: int  # images to evaluate
    checkpoint_bytes: int

    @property
    def gpus(self) -> int:
        return self.timeline.world_size

    @cached_property
    def plan(self) -> Plan | None:
        """How gradients are reduced; None on one GPU."""
        if self.gpus == 1:
            return None
        topology = self.common.cluster(self.gpus).topology
        plan = build_plan(self.recipe, topology)
        plan.check(topology)
        return plan

    def counts(self) -> tuple[int, int]:
        """Number of evaluations and of checkpoints, those at the end included."""
        recipe, times_due = self.recipe, self.timeline.times_due
        last = self.timeline.last_step(recipe)
        evaluated = recipe.evaluate_every if self.validation else None
        saved = recipe.checkpoint.every
        return (
            1 + times_due(evaluated, 0, last - 1) if evaluated else 0,
            1 + (times_due(saved, 0, last - 1) if saved else 0),
        )

    def pixels(self, image_size: int) -> float:
        """Pixels of images relative to the recipe's."""
        return float((image_size / self.recipe.data.image_size) ** 2)

    def times(self, rates: Rates) -> Times:
        """Predict the times of the run."""
        timeline, recipe = self.timeline, self.recipe
        last = timeline.last_step(recipe)
        ends = [*timeline.first_steps[1:], last]
        steps = [self._step(phase, rates) for phase in timeline.phases]
        training = sum(
            max(0, min(end, last) - min(start, last)) * seconds
            for seconds, start, end in zip(steps, timeline.first_steps, ends, strict=True)
        )
        evaluations, checkpoints = self.counts()
        weights = 1 if recipe.ema.decay is None else 2
        micro = timeline.phases[-1].micro_batch_size
        batches = math.ceil(self.validation / (micro * self.gpus))
        pixels = self.pixels(recipe.eval_size)
        alone = self.common.images / self.common.profile.compute_seconds * rates.speed
        evaluation = _START_SECONDS + batches * micro * pixels / (_EVALUATION_SPEED * alone)
        checkpoint = _START_SECONDS + self.checkpoint_bytes / _CHECKPOINT_BYTES_PER_SECOND
        return Times(
            steps[0],
            training,
            rates.besides * evaluations * weights * evaluation,
            rates.besides * checkpoints * checkpoint,
        )

    def _step(self, phase: Phase, rates: Rates) -> float:
        """Seconds of a step of a stage, whose last micro-batch alone is reduced."""
        images = phase.micro_batch_size * self.pixels(phase.image_size)
        one = self.common.speed.step.seconds(images) / rates.speed
        before = (phase.accumulation(self.gpus) - 1) * one
        if self.plan is None:
            return before + one
        reduced = self.common.simulate(self.common.profile.scaled(one), self.gpus, self.plan)
        late = straggler_slowdown(self.gpus, STRAGGLER_SIGMA)
        return (before * late + reduced.step_seconds) / rates.kept

    def assumptions(self, efficiency: float) -> tuple[Assumption, ...]:
        """What each assumption changes, the one that changes most first."""
        best, between = self.common.speed.best.per_gpu, self.common.speed.between
        low, high = self.common.between(self.gpus, efficiency)
        found = (
            (
                "speed of one GPU",
                f"{between.low:,.0f} to {between.high:,.0f} images/s: {between.source}",
                Rates(speed=between.high / best),
                Rates(speed=between.low / best),
            ),
            (
                "scaling",
                f"{low:.2f} to {high:.2f} times the prediction, as {PUBLISHED_RUNS} published runs",
                Rates(kept=high),
                Rates(kept=low),
            ),
            (
                "evaluation and checkpoints",
                "a third to three times as long (assumed)",
                Rates(besides=1 / 3),
                Rates(besides=3.0),
            ),
        )
        effects = (
            Assumption(name, text, self.times(short).total, self.times(long).total)
            for name, text, short, long in found
        )
        return tuple(sorted(effects, key=lambda one: one.low - one.high))


def _statistics(recipe: Recipe, model: nn.Module, timeline: Timeline, gpus: int) -> int | None:
    """Number of images over which batch norm takes statistics in the first stage."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return None
    asked = recipe.batch_norm
    return asked.images or asked.group(gpus) * timeline.phases[0].micro_batch_size


def _data(recipe: Recipe) -> tuple[int, int, str]:
    """Number of classes, number of images to evaluate, and the source of the latter."""
    data = recipe.data
    if data.source == "synthetic":
        return data.classes, data.val_images, "data.val_images"
    assert data.path is not None  # checked by the schema
    if is_url(data.path) or Path(data.path).is_dir():
        train = open_split(data, "train")
        classes = len(train.classes)
        if data.holdout or recipe.evaluate_every is None:
            return classes, data.holdout or 0, "data.holdout" if data.holdout else "none"
        val = len(open_split(data, "val", train.classes))
        return classes, val, f"in {without_query(data.path)}/val"
    if data.holdout:
        return data.classes, data.holdout, "data.holdout"
    if data.train_images == _IMAGENET[0]:
        return data.classes, _IMAGENET[1], "ImageNet's"
    return data.classes, data.train_images // 5, "a fifth of the training images, assumed"
