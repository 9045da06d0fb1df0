"""Scaling sweep: predict a recipe's training step on clusters of increasing size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...amp import OPT_LEVELS, PRECISIONS
from ...comm import (
    WIRE_DTYPES,
    Cluster,
    Links,
    Nccl,
    Plan,
    PlanError,
    Profile,
    Rule,
    Simulation,
    StepTime,
    TopologyError,
    candidates,
    estimate_profile,
    predict_plan,
    simulate,
)
from ..errors import RecipeError
from ..models.build import build_model
from ..schema.load import Loaded
from ..schema.recipe import Recipe
from .network import find_network
from .presets import STRAGGLER_SIGMA
from .speed import find_speed, gpu_named

_SMALLEST_GPUS = 8
#: Chunk sizes that a chosen plan may use.
CHUNKS_BYTES = (2**20, 2**22)
#: A chosen plan leaves NCCL's own all-reduce only for what is faster by more than this share.
WORTH = 0.1


@dataclass(frozen=True)
class Setting:
    """The settings that all clusters of a sweep share.

    Attributes:
        title: model, images per GPU and GPU, as text.
        profile: profile of the step on one GPU.
        step: the time of a step on one GPU by the number of images.
        fitted: smallest and largest number of images for which ``step`` holds; None if any.
        images: number of images per GPU and step.
        gpus_per_node: number of GPUs on each node.
        links: links inside and between nodes, at line rate or as they were fitted.
        nccl: the same links as NCCL sees them; None if they were fitted.
        plan: plan for all sizes; None chooses the fastest predicted one for each size.
        wire_dtypes: dtypes in which a chosen plan may send gradients.
        inputs: one line for each input, with its source.
    """

    title: str
    profile: Profile
    step: StepTime
    fitted: tuple[int, int] | None
    images: int
    gpus_per_node: int
    links: Links
    nccl: Nccl | None
    plan: Plan | None
    wire_dtypes: tuple[str, ...]
    inputs: tuple[str, ...]

    @property
    def images_per_second(self) -> float:
        """Throughput of one GPU alone."""
        return self.images / self.profile.compute_seconds

    def cluster(self, gpus: int, nccl: Nccl | None = None, links: Links | None = None) -> Cluster:
        """Return a cluster of this kind.

        Args:
            gpus: its number of GPUs.
            nccl: in place of :attr:`nccl`.
            links: in place of :attr:`links`.
        """
        return Cluster.of(
            gpus,
            self.gpus_per_node,
            links or self.links,
            nccl=nccl or self.nccl,
            straggler_sigma=STRAGGLER_SIGMA,
        )

    def warnings(self, images: int) -> tuple[str, ...]:
        """Return a line if the time of a step is not known for ``images`` per GPU."""
        if self.fitted is None or self.fitted[0] <= images <= self.fitted[1]:
            return ()
        low, high = self.fitted
        known = f"{low} to {high}" if low < high else f"{low}"
        return (
            f"{images} images per GPU are outside of {known}, for which the time of a step is "
            "known; measure two batch sizes and give --measured",
        )


@dataclass(frozen=True)
class Point:
    """The prediction for one cluster size.

    Attributes:
        gpus: number of GPUs.
        plan: the plan that is simulated.
        planned: the step with that plan.
        default: the step with DDP's default: the back end's own all-reduce, which is NCCL's unless
            links were fitted, with buckets of 25 MiB.
        unfused: the step with a flat ring for each gradient by itself, the paper's baseline.
    """

    gpus: int
    plan: Plan
    planned: Simulation
    default: Simulation
    unfused: Simulation


def setting(
    loaded: Loaded,
    *,
    gpu: str | None = None,
    links: str | None = None,
    gpus_per_node: int | None = None,
    images_per_second: float | None = None,
    measured: str | None = None,
    images_per_gpu: int | None = None,
    bus_gbytes: float | None = None,
    oversubscription: float = 1.0,
    inter: tuple[float | None, float | None] = (None, None),
    intra: tuple[float | None, float | None] = (None, None),
    fitted: Path | None = None,
    plan: Path | None = None,
    algorithm: str | None = None,
    wire: str | None = None,
    alone: bool = False,
) -> Setting:
    """Collect the settings of a sweep from a recipe and the options of the command line.

    Args:
        loaded: the recipe.
        gpu: name of a GPU preset.
        links: ``INTRA+INTER``, names of link presets; by default those of the GPU.
        gpus_per_node: number of GPUs per node; by default that of the GPU preset.
        images_per_second: throughput of one GPU, in place of the preset's.
        measured: two steps measured on one GPU, as ``IMAGES:MS,IMAGES:MS``, in place of both.
        images_per_gpu: images per GPU and step; by default the recipe's ``micro_batch_size``.
        bus_gbytes: measured bus bandwidth between nodes, in 10^9 bytes per second.
        oversubscription: factor by which the network between nodes is oversubscribed.
        inter: microseconds and Gbit/s between nodes, in place of a preset's.
        intra: microseconds and Gbit/s inside a node, in place of a preset's.
        fitted: file with the links fitted by ``largebatch comm tune``, in place of presets.
        plan: file with the plan to simulate.
        algorithm: algorithm for all message sizes, in place of a plan.
        wire: dtype in which gradients may be sent.
        alone: whether only single GPUs are asked about, which need no links.

    Raises:
        RecipeError, PlanError: options are unknown, exclude each other, or are missing.
    """
    recipe = loaded.recipe
    if plan is not None and algorithm is not None:
        raise RecipeError("--plan: given together with --algorithm; valid: one of the two")
    if wire is not None and wire not in WIRE_DTYPES:
        raise RecipeError(f"--wire: unknown dtype {wire!r}; valid: {', '.join(WIRE_DTYPES)}")
    preset = gpu_named(gpu)
    images = images_per_gpu or recipe.micro_batch_size
    if images is None:
        raise RecipeError(
            "--images-per-gpu: missing, and the recipe has no micro_batch_size; valid: images per "
            "GPU and step"
        )
    speed = find_speed(recipe, gpu, images, images_per_second, measured)
    step, inputs = speed.step, [*speed.sources]
    with torch.device("meta"):
        # Initial values do not change the time: a model without residual blocks is welcome too.
        wanted = recipe.model.model_copy(update={"zero_init_last_norm": False})
        model = build_model(wanted, recipe.data.classes)
        inputs_of_model = torch.empty(2, 3, recipe.data.image_size, recipe.data.image_size)
    profile = estimate_profile(
        model, [inputs_of_model], step.seconds(images), gradient_dtype=gradient_dtype(recipe)
    )
    inputs.append(
        "time of each layer: proportional to its FLOPs, with two thirds of the step in backward"
    )
    network = (
        None
        if alone
        else find_network(
            preset,
            links,
            inter=inter,
            intra=intra,
            bus_gbytes=bus_gbytes,
            oversubscription=oversubscription,
            fitted=fitted,
        )
    )
    inputs.append(
        f"stragglers: a rank's time varies by {STRAGGLER_SIGMA:.1%} [C]; a step waits for the "
        "slowest"
    )
    chosen = Plan.load(plan) if plan else None
    if algorithm is not None:
        chosen = Plan.single(algorithm, wire_dtype=wire)
    name = f"{recipe.model.name}, {images} images per GPU"
    return Setting(
        f"{name} on {gpu}" if gpu else name,
        profile,
        step,
        speed.holds,
        images,
        gpus_per_node or (preset.per_node if preset else 8),
        network.links if network else Links(None, None),
        network.nccl if network else None,
        chosen,
        (wire,) if wire else (),
        (*inputs, *(network.sources if network else ())),
    )


def gradient_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype that DDP reduces, ignoring that norm layers may keep FP32 gradients."""
    if recipe.precision == "auto":
        return torch.float32
    return PRECISIONS[OPT_LEVELS.get(recipe.precision, recipe.precision)].parameters


def sweep(common: Setting, gpus: int) -> list[Point]:
    """Predict clusters of 8, 16, 32, … and finally ``gpus`` GPUs.

    Raises:
        RecipeError: ``gpus`` is less than 2 or does not fill whole nodes.
    """
    if gpus < 2:
        raise RecipeError(f"--gpus: {gpus} needs no all-reduce; valid: 2 or more")
    sizes = []
    size = _SMALLEST_GPUS
    while size < gpus:
        sizes.append(size)
        size *= 2
    points = []
    for size in [*sizes, gpus]:
        per_node = common.gpus_per_node
        if size > per_node and size % per_node:
            if size != gpus:
                continue  # only the requested size has to fit
            raise RecipeError(
                f"--gpus: {gpus} GPUs do not fill nodes of {per_node}; valid: a multiple of "
                f"{per_node}, such as {max(1, gpus // per_node) * per_node}"
            )
        points.append(_point(common, size))
    return points


def _point(common: Setting, gpus: int) -> Point:
    try:
        cluster = common.cluster(gpus)
        plan = common.plan
        if plan is None:
            rules = candidates(
                cluster.topology, chunks_bytes=CHUNKS_BYTES, wire_dtypes=common.wire_dtypes
            )
            tolerance = WORTH if cluster.nccl else 0.0
            plan = predict_plan(common.profile, cluster, rules, tolerance=tolerance)
        ring = cluster
        if cluster.nccl:
            ring = replace(cluster, nccl=None, links=cluster.nccl.links)
        return Point(
            gpus,
            plan,
            simulate(common.profile, cluster, plan),
            simulate(common.profile, cluster, Plan.single("ring")),
            simulate(common.profile, ring, Plan((Rule("ring"),), fusion_threshold_bytes=1)),
        )
    except (PlanError, TopologyError):
        raise
    except ValueError as error:
        raise RecipeError(f"--links: {error}") from None
