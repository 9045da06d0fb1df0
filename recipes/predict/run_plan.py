"""The plan of a run: steps, memory, time and cost of a recipe on several numbers of GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...amp import PRECISIONS
from ...comm import Plan, PlanError, Topology, TopologyError, candidates, predict_plan
from ...pipeline import Loader, without_query
from ..errors import RecipeError
from ..models.batch_norm import check_batch_norm
from ..schema.load import Loaded
from ..schema.recipe import Recipe
from ..training.build import build_plan
from ..training.data import is_url, open_split
from ..training.memory import Memory, MemoryCounter
from ..training.timeline import Timeline, timeline_of
from ..training.watch.time_left import EVALUATION_SPEED
from .assumptions import Effect, Rates, assumptions, effects
from .division import fit
from .presets import GPUS, Gpu
from .run_times import Run, Times
from .scaling import CHUNKS_BYTES, WORTH, Setting, setting
from .schedule import image_count

#: A plan that is chosen by the model is mentioned if it makes steps faster by this share.
_WORTH = 0.05
_IMAGENET = (1_281_167, 50_000)


@dataclass(frozen=True)
class Point:
    """The plan for one number of GPUs.

    Attributes:
        gpus: Number of GPUs.
        recipe: The recipe, with the micro-batches that divide on them.
        timeline: Its steps.
        accumulation: Micro-batches of a GPU in each step of the first stage.
        batch_norm_images: Images over which batch norm takes statistics; None without batch norm.
        reduced_bytes: Bytes of the gradients that each step reduces; 0 on one GPU.
        memory: Memory per GPU by precision.
        times: The predicted times.
        effects: What each assumption changes, the one that changes most first.
        cost: Price of the run; None without a price.
        notices: What must change, or is worth a look.
    """

    gpus: int
    recipe: Recipe
    timeline: Timeline
    accumulation: int
    batch_norm_images: int | None
    reduced_bytes: int
    memory: tuple[Memory, ...]
    times: Times
    effects: tuple[Effect, ...]
    cost: float | None
    notices: tuple[str, ...]

    @property
    def micro_batch_size(self) -> int:
        """Images of a forward pass in the first stage."""
        return self.timeline.phases[0].micro_batch_size


@dataclass(frozen=True)
class RunPlan:
    """The plans for all numbers of GPUs, and what they share.

    Attributes:
        name: Name of the recipe.
        gpu: Name of the GPU preset; None without one.
        memory_gb: Memory of that GPU, in 10^9 bytes; None without a preset.
        precision: The precision that is planned with.
        epochs: Length of the run.
        steps: Number of updates.
        evaluations: Number of evaluations.
        checkpoints: Number of checkpoints.
        inputs: One line for each input, with its source.
        points: The plans.
        price: Price of an hour of one GPU.
    """

    name: str
    gpu: str | None
    memory_gb: float | None
    precision: str
    epochs: float
    steps: int
    evaluations: int
    checkpoints: int
    inputs: tuple[str, ...]
    points: tuple[Point, ...]
    price: float | None


def plan_run(
    loaded: Loaded,
    gpus: Sequence[int],
    *,
    evaluation_images_per_second: float | None = None,
    checkpoint_seconds: float | None = None,
    price: float | None = None,
    **options: Any,
) -> RunPlan:
    """Plan a run on each of some numbers of GPUs.

    Args:
        loaded: The recipe.
        gpus: Numbers of GPUs, ascending.
        evaluation_images_per_second: Throughput of one GPU in evaluation.
        checkpoint_seconds: Time of a checkpoint.
        price: Price of an hour of one GPU.
        options: Of :func:`~.scaling.setting`: ``gpu``, ``links``, ``gpus_per_node``,
            ``images_per_second``, ``measured``, ``oversubscription``, ``fitted``.

    Raises:
        RecipeError, DataError, PlanError, TopologyError: Options or recipe do not fit.
    """
    recipe, preset = loaded.recipe, GPUS.get(options.get("gpu") or "")
    classes, validation, source = _data(recipe)
    images, where = image_count(recipe)
    data = recipe.data.model_copy(update={"classes": classes})
    recipe = recipe.model_copy(update={"data": data})
    fitting = [fit(recipe, n) for n in gpus]
    micro = fitting[0][0].micro_batch_size or recipe.batch_size // gpus[0]
    counter = MemoryCounter(recipe, classes)
    common = _setting(replace(loaded, recipe=recipe), micro, gpus, options)
    rate = common.images_per_second
    rates = Rates(rate, evaluation_images_per_second or EVALUATION_SPEED * rate)
    if checkpoint_seconds is not None:
        given = {"checkpoint_bytes_per_second": math.inf}
        rates = replace(rates, checkpoint_start_seconds=checkpoint_seconds, **given)
    found = assumptions(
        rates,
        preset,
        given=options.get("images_per_second") is not None or options.get("measured") is not None,
        fixed_seconds=common.step.fixed_seconds,
        given_evaluation=evaluation_images_per_second is not None,
        given_checkpoint=checkpoint_seconds is not None,
    )
    precision = "fp32" if recipe.precision == "auto" else recipe.precision  # that needs more
    counts: tuple[int, int] | None = None
    points = []
    for (fitted, notices), n in zip(fitting, gpus, strict=True):
        timeline = timeline_of(fitted, images, n)
        model = counter.model
        check_batch_norm(fitted, model, cast(Loader, timeline), n)  # of which it needs the phases
        run = Run(
            fitted,
            timeline,
            common,
            None if n == 1 else _plan(fitted, common, n),
            validation,
            counter.checkpoint_bytes(precision, n),
        )
        counts = counts or run.counts()  # steps do not depend on the number of GPUs
        times = run.times(rates, counts)
        memory = _memory(counter, run, precision)
        notices += _slow_plan(run, rates) + _too_large(memory, precision, preset, n)
        for phase in timeline.phases:
            notices += common.warnings(phase.micro_batch_size)
        points.append(
            Point(
                n,
                fitted,
                timeline,
                timeline.phases[0].accumulation(n),
                _statistics(fitted, model, timeline, n),
                0 if n == 1 else counter.gradient_bytes(precision),
                memory,
                times,
                tuple(effects(found, partial(run.total, counts=counts))),
                None if price is None else price * n * times.total / 3600,
                notices,
            )
        )
    timeline = points[0].timeline
    last = timeline.last_step(recipe)
    assert counts is not None
    return RunPlan(
        loaded.name,
        options.get("gpu"),
        None if preset is None else preset.memory_gb,
        precision,
        timeline.epoch(last),
        last,
        *counts,
        (
            f"{images:,} training images ({where}), {validation:,} to evaluate ({source})",
            *common.inputs,
            *_stated(rates, evaluation_images_per_second, checkpoint_seconds),
        ),
        tuple(points),
        price,
    )


def _setting(loaded: Loaded, micro: int, gpus: Sequence[int], options: dict[str, Any]) -> Setting:
    """The step on one GPU, and the links."""
    try:
        return setting(loaded, images_per_gpu=micro, alone=gpus[-1] == 1, **options)
    except (ValueError, RuntimeError) as error:  # of the model; the user's errors are neither
        if isinstance(error, PlanError | TopologyError):
            raise
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RecipeError(
            f"model.name: {loaded.recipe.model.name} cannot be run on the meta device: {line}; "
            "valid: a model whose forward pass does not read values of tensors"
        ) from error


def _plan(recipe: Recipe, common: Setting, gpus: int) -> Plan:
    """How the trainer reduces gradients on some GPUs."""
    per_node = min(common.gpus_per_node, gpus)
    if gpus % per_node:
        raise RecipeError(
            f"--gpus: {gpus} GPUs do not fill nodes of {per_node}; valid: a multiple of "
            f"{per_node}, such as {gpus // per_node * per_node}, or --gpus-per-node"
        )
    topology = Topology.of(gpus, per_node)
    plan = build_plan(recipe, topology)
    plan.check(topology)
    return plan


def _memory(counter: MemoryCounter, run: Run, own: str) -> tuple[Memory, ...]:
    """Memory of the stage that needs most, in each precision that the recipe allows."""
    found = []
    for name in PRECISIONS:
        try:
            each = [
                counter.count(
                    name,
                    phase.micro_batch_size,
                    phase.image_size,
                    ranks=run.gpus,
                    accumulation=phase.accumulation(run.gpus),
                )
                for phase in run.timeline.phases
            ]
        except RecipeError:
            if name == own:
                raise
            continue  # such as a precision that the optimizer does not work in
        found.append(max(each, key=lambda memory: memory.peak))
    return tuple(found)


def _statistics(recipe: Recipe, model: nn.Module, timeline: Timeline, gpus: int) -> int | None:
    """Number of images over which batch norm takes statistics in the first stage."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return None
    asked = recipe.batch_norm
    ranks = {"group": asked.ranks or 1, "global": gpus}.get(asked.over, 1)
    return asked.images or ranks * timeline.phases[0].micro_batch_size


def _slow_plan(run: Run, rates: Rates) -> tuple[str, ...]:
    """A line if another all-reduce plan would make steps faster."""
    if run.plan is None:
        return ()
    cluster = run.common.cluster(run.gpus)
    one = run.alone(run.timeline.phases[0].micro_batch_size, rates)
    profile = run.common.profile.scaled(one)
    rules = candidates(cluster.topology, chunks_bytes=CHUNKS_BYTES)
    best = predict_plan(profile, cluster, rules, tolerance=WORTH if cluster.nccl else 0.0)
    step = run.times(rates, (0, 0)).step_seconds
    faster = step - run.reduced(one, rates) + run.reduced(one, rates, best)
    if faster * (1 + _WORTH) > step:
        return ()
    return (
        f"{run.gpus:,} GPUs: {1e3 * faster:.1f} ms per step instead of {1e3 * step:.1f} with the "
        "best predicted all-reduce plan; see comm.plan and largebatch comm tune",
    )


def _too_large(
    memory: tuple[Memory, ...], precision: str, preset: Gpu | None, gpus: int
) -> tuple[str, ...]:
    """A line if a step needs more memory than the GPU has."""
    own = next(one for one in memory if one.precision == precision)
    if preset is None or own.peak <= 1e9 * preset.memory_gb:
        return ()
    return (
        f"{gpus:,} GPUs: {own.peak / 1e9:.1f} GB with micro_batch_size={own.micro_batch_size} do "
        f"not fit into {preset.memory_gb:g} GB; a smaller one does the same steps, with batch norm "
        "over fewer images",
    )


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
        return (
            classes,
            len(open_split(data, "val", train.classes)),
            f"in {without_query(data.path)}/val",
        )
    if data.holdout:
        return data.classes, data.holdout, "data.holdout"
    if data.train_images == _IMAGENET[0]:
        return data.classes, _IMAGENET[1], "ImageNet's"
    return data.classes, data.train_images // 5, "a fifth of the training images, assumed"


def _stated(rates: Rates, evaluation: float | None, checkpoint: float | None) -> tuple[str, ...]:
    """Lines on the assumptions about evaluation and checkpoints."""
    speed = f"{rates.evaluation_images_per_second:,.0f} images/s per GPU in evaluation: "
    speed += "given" if evaluation else f"{EVALUATION_SPEED:g} times that of training (assumed)"
    written = f"{rates.checkpoint_start_seconds:g} s per checkpoint: given"
    if checkpoint is None:
        written = "0.5 s and 1 GB/s per checkpoint, 0.5 s to start an evaluation (assumed)"
    return speed, written
