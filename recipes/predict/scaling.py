"""A recipe's step on clusters of many sizes, predicted."""

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

_SMALLEST = 8  # GPUs that a sweep starts from
_CHUNKS_BYTES = (2**20, 2**22)


@dataclass(frozen=True)
class Setting:
    """What the clusters of a sweep have in common.

    Attributes:
        title: model, GPU and images per GPU.
        profile: of one GPU's step.
        images: that a GPU sees in a step.
        gpus_per_node: ranks on each node.
        links: inside and between nodes.
        plan: for all sizes; None has the model choose one for each.
        wire_dtypes: that a chosen plan may send gradients in.
        inputs: where each number comes from, one line each.
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
    """One size of cluster: by the plan, and with one flat all-reduce per 25 MiB as DDP has it."""

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
) -> Setting:
    """Gather what a sweep needs from a recipe and the command line's options.

    Args:
        inter: microseconds and Gbit/s between nodes, in place of a preset's.
        intra: the same inside a node.
        fitted: what ``largebatch comm tune`` wrote, in place of presets.

    Raises:
        RecipeError, PlanError: options that do not exist, do not go together, or do not suffice.
    """
    recipe = loaded.recipe
    if plan is not None and algorithm is not None:
        raise RecipeError("--plan: give either a plan or an --algorithm")
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
            "--images-per-gpu: the recipe has no micro_batch_size, so say how many images a GPU "
            "sees in a step"
        )
    with torch.device("meta"):
        model = build_model(recipe.model, recipe.data.classes)
        inputs_of_model = torch.empty(2, 3, recipe.data.image_size, recipe.data.image_size)
    profile = estimate_profile(
        model, [inputs_of_model], images / rate, gradient_dtype=gradient_dtype(recipe)
    )
    inputs.append(
        "times of layers in backward: shared out by FLOPs, two thirds of the step being backward"
    )
    found, told = _links(preset, links, inter, intra, fitted)
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
        (*inputs, *told),
    )


def gradient_dtype(recipe: Recipe) -> torch.dtype:
    """What DDP reduces; the few gradients of norm layers, in FP32, are taken to be of it too."""
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
        raise RecipeError("--images-per-second: say how fast one GPU is, or name it with --gpu")
    if (model, image_size) != (MODEL, IMAGE_SIZE):
        raise RecipeError(
            f"--images-per-second: that of a {gpu} is known for {MODEL} at {IMAGE_SIZE} pixels "
            f"only; say what {model} at {image_size} reaches"
        )
    return preset.images_per_second


def _links(
    preset: Gpu | None,
    named: str | None,
    inter: tuple[float | None, float | None],
    intra: tuple[float | None, float | None],
    fitted: Path | None,
) -> tuple[Links, list[str]]:
    """The links, and a line for each on where its numbers come from."""
    if fitted is not None:
        if named is not None or any(v is not None for v in (*inter, *intra)):
            raise RecipeError("--fitted: goes without --links and without numbers of links")
        try:
            return Tuned.load(fitted).links, [f"links: fitted, {fitted}"]
        except ValueError as error:
            raise RecipeError(f"--fitted: {error}") from None
    names = links_named(named) if named else preset.links if preset else None
    levels = []
    told = []
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
                f"--links: nothing is known of the links {where}; valid: --links INTRA+INTER, or "
                f"{option}alpha-us and {option}gbit"
            )
        try:
            levels.append(Level.of(latency_us, gbit))
        except ValueError as error:
            raise RecipeError(f"--links: {error}") from None
        latency_source = "given" if given[0] is not None else "[S] NCCL's model"
        rate_source = "given" if given[1] is not None or base is None else base.source
        told.append(
            f"links {where}: {latency_us:g} us ({latency_source}), {gbit:g} Gbit/s ({rate_source})"
        )
    intra_level, inter_level = levels
    return Links(intra_level, inter_level), told


def sweep(common: Setting, gpus: int) -> list[Point]:
    """Clusters of 8, 16, … up to ``gpus`` GPUs, and of ``gpus``.

    Raises:
        RecipeError: that many GPUs do not fill whole nodes.
    """
    if gpus < 2:
        raise RecipeError(f"--gpus: {gpus} have nothing to reduce; valid: 2 and up")
    sizes = []
    size = _SMALLEST
    while size < gpus:
        sizes.append(size)
        size *= 2
    points = []
    for size in [*sizes, gpus]:
        per_node = common.gpus_per_node
        if size > per_node and size % per_node:
            if size != gpus:
                continue  # only what was asked for must fit
            raise RecipeError(
                f"--gpus: {gpus} do not fill nodes of {per_node}; valid: a multiple, such as "
                f"{max(1, gpus // per_node) * per_node}"
            )
        points.append(_point(common, size))
    return points


def _point(common: Setting, gpus: int) -> Point:
    try:
        cluster = Cluster.of(gpus, common.gpus_per_node, common.links)
        plan = common.plan
        if plan is None:
            rules = candidates(
                cluster.topology, chunks_bytes=_CHUNKS_BYTES, wire_dtypes=common.wire_dtypes
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
