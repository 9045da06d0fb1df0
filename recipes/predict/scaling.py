"""Scaling sweep: predict a recipe's training step on clusters of increasing size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...amp import OPT_LEVELS, PRECISIONS
from ...comm import (
    WIRE_DTYPES,
    Cluster,
    Level,
    Links,
    Plan,
    Profile,
    Simulation,
    TopologyError,
    Tuned,
    candidates,
    estimate_profile,
    predict_plan,
    simulate,
)
from ..errors import RecipeError, did_you_mean
from ..models.build import build_model
from ..schema.load import Loaded
from ..schema.recipe import Recipe
from .presets import GPUS, IMAGE_SIZE, INTER, INTRA, MODEL, Gpu, links_named

_SMALLEST_GPUS = 8
#: Chunk sizes that a chosen plan may use.
CHUNKS_BYTES = (2**20, 2**22)


@dataclass(frozen=True)
class Setting:
    """The settings that all clusters of a sweep share.

    Attributes:
        title: model, images per GPU and GPU, as text.
        profile: profile of the step on one GPU.
        images: number of images per GPU and step.
        gpus_per_node: number of GPUs on each node.
        links: links inside and between nodes.
        plan: plan for all sizes; None chooses the fastest predicted one for each size.
        wire_dtypes: dtypes in which a chosen plan may send gradients.
        inputs: one line for each input, with its source.
    """

    title: str
    profile: Profile
    images: int
    gpus_per_node: int
    links: Links
    plan: Plan | None
    wire_dtypes: tuple[str, ...]
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """The prediction for one cluster size.

    Attributes:
        gpus: number of GPUs.
        plan: the plan that is simulated.
        planned: the step with that plan.
        flat: the step with DDP's default, a flat ring with buckets of 25 MiB.
    """

    gpus: int
    plan: Plan
    planned: Simulation
    flat: Simulation


def setting(
    loaded: Loaded,
    *,
    gpu: str | None = None,
    links: str | None = None,
    gpus_per_node: int | None = None,
    images_per_second: float | None = None,
    images_per_gpu: int | None = None,
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
        images_per_gpu: images per GPU and step; by default the recipe's ``micro_batch_size``.
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
    preset = _gpu(gpu)
    inputs = []
    rate = images_per_second
    if rate is None:
        rate = _known_rate(recipe.model.name, recipe.data.image_size, gpu, preset)
        assert preset is not None
        inputs.append(f"{rate:g} images/s per GPU: {preset.source}")
    else:
        inputs.append(f"{rate:g} images/s per GPU: given")
    images = images_per_gpu or recipe.micro_batch_size
    if images is None:
        raise RecipeError(
            "--images-per-gpu: missing, and the recipe has no micro_batch_size; valid: images per "
            "GPU and step"
        )
    with torch.device("meta"):
        model = build_model(recipe.model, recipe.data.classes)
        inputs_of_model = torch.empty(2, 3, recipe.data.image_size, recipe.data.image_size)
    profile = estimate_profile(
        model, [inputs_of_model], images / rate, gradient_dtype=gradient_dtype(recipe)
    )
    inputs.append(
        "time of each layer: proportional to its FLOPs, with two thirds of the step in backward"
    )
    found, link_sources = (
        (Links(None, None), []) if alone else _links(preset, links, inter, intra, fitted)
    )
    chosen = Plan.load(plan) if plan else None
    if algorithm is not None:
        chosen = Plan.single(algorithm, wire_dtype=wire)
    name = f"{recipe.model.name}, {images} images per GPU"
    return Setting(
        f"{name} on {gpu}" if gpu else name,
        profile,
        images,
        gpus_per_node or (preset.per_node if preset else 8),
        found,
        chosen,
        (wire,) if wire else (),
        (*inputs, *link_sources),
    )


def gradient_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype that DDP reduces, ignoring that norm layers may keep FP32 gradients."""
    if recipe.precision == "auto":
        return torch.float32
    return PRECISIONS[OPT_LEVELS.get(recipe.precision, recipe.precision)].parameters


def _gpu(name: str | None) -> Gpu | None:
    if name is None:
        return None
    if name not in GPUS:
        raise RecipeError(
            f"--gpu: unknown GPU {name!r}{did_you_mean(name, list(GPUS))}; valid: {', '.join(GPUS)}"
        )
    return GPUS[name]


def _known_rate(model: str, image_size: int, gpu: str | None, preset: Gpu | None) -> float:
    if preset is None:
        raise RecipeError(
            "--images-per-second: missing; valid: the throughput of one GPU, or a preset by --gpu"
        )
    if (model, image_size) != (MODEL, IMAGE_SIZE):
        raise RecipeError(
            f"--images-per-second: missing; the preset of {gpu} is for {MODEL} at {IMAGE_SIZE} "
            f"pixels only; valid: the throughput of {model} at {image_size} pixels"
        )
    return preset.images_per_second


def _links(
    preset: Gpu | None,
    named: str | None,
    inter: tuple[float | None, float | None],
    intra: tuple[float | None, float | None],
    fitted: Path | None,
) -> tuple[Links, list[str]]:
    """Return the links and one line for each on the source of its numbers."""
    if fitted is not None:
        if named is not None or any(v is not None for v in (*inter, *intra)):
            raise RecipeError(
                "--fitted: given together with other options on links; valid: without --links and "
                "without latencies and rates"
            )
        try:
            return Tuned.load(fitted).links, [f"links: fitted by comm tune, {fitted}"]
        except ValueError as error:
            raise RecipeError(f"--fitted: {error}") from None
    names = links_named(named) if named else preset.links if preset else None
    levels = []
    sources = []
    for where, given, table, index, option in (
        ("inside a node", intra, INTRA, 0, "--intra-"),
        ("between nodes", inter, INTER, 1, "--"),
    ):
        base = table[names[index]] if names else None
        latency_us, gbit = given
        if base is not None:
            latency_us = base.latency_us if latency_us is None else latency_us
            gbit = base.gbit if gbit is None else gbit
        if latency_us is None or gbit is None:
            raise RecipeError(
                f"--links: the links {where} are unknown; valid: --links INTRA+INTER, or "
                f"{option}alpha-us and {option}gbit"
            )
        try:
            levels.append(Level.of(latency_us, gbit))
        except ValueError as error:
            raise RecipeError(f"--links: {error}") from None
        latency_source = "given" if given[0] is not None else "[S] NCCL's model"
        rate_source = "given" if given[1] is not None or base is None else base.source
        sources.append(
            f"links {where}: {latency_us:g} us ({latency_source}), {gbit:g} Gbit/s ({rate_source})"
        )
    intra_level, inter_level = levels
    return Links(intra_level, inter_level), sources


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
        cluster = Cluster.of(gpus, common.gpus_per_node, common.links)
        plan = common.plan
        if plan is None:
            rules = candidates(
                cluster.topology, chunks_bytes=CHUNKS_BYTES, wire_dtypes=common.wire_dtypes
            )
            plan = predict_plan(common.profile, cluster, rules)
        return Point(
            gpus,
            plan,
            simulate(common.profile, cluster, plan),
            simulate(common.profile, cluster, Plan.single("ring")),
        )
    except TopologyError:
        raise
    except ValueError as error:
        raise RecipeError(f"--links: {error}") from None
