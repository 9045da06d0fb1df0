"""Predict a recipe's training step on clusters of increasing size: ``largebatch comm simulate``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...amp import OPT_LEVELS, PRECISIONS
from ...comm import (
    Cluster,
    Links,
    Nccl,
    Plan,
    PlanError,
    Profile,
    Simulation,
    TopologyError,
    Tuned,
    estimate_profile,
    simulate,
)
from ..errors import RecipeError
from ..models.build import build_model
from ..output import console, table
from ..schema.load import Loaded
from ..schema.recipe import Recipe
from .presets import (
    INTER,
    INTRA,
    PUBLISHED_OVER_PREDICTED,
    PUBLISHED_RUNS,
    STRAGGLER_SIGMA,
    Gpu,
    links_named,
)
from .speed import Speed, find_speed, gpu_named

_SMALLEST_GPUS = 8


@dataclass(frozen=True)
class Setting:
    """What clusters of any size share, with the source of each; ``images`` are per GPU."""

    title: str
    profile: Profile
    speed: Speed
    images: int
    gpus_per_node: int
    links: Links | None
    nccl: Nccl | None
    inputs: tuple[str, ...]

    def cluster(self, gpus: int) -> Cluster:
        """Return a cluster of this kind."""
        per_node = min(gpus, self.gpus_per_node)
        if gpus % per_node:
            raise RecipeError(
                f"--gpus: {gpus} GPUs do not fill nodes of {per_node}; valid: a multiple of "
                f"{per_node}, such as {gpus // per_node * per_node}, or --gpus-per-node"
            )
        return Cluster.of(
            gpus, per_node, self.links, nccl=self.nccl, straggler_sigma=STRAGGLER_SIGMA
        )

    def simulate(self, profile: Profile, gpus: int, plan: Plan) -> Simulation:
        """Simulate a step."""
        try:
            return simulate(profile, self.cluster(gpus), plan)
        except (PlanError, TopologyError, RecipeError):
            raise
        except ValueError as error:
            raise RecipeError(f"--links: {error}") from None

    def efficiency(self, images_per_second: float) -> float:
        """Throughput of a GPU relative to that of the best measured batch, from 0 to 1."""
        return images_per_second / self.speed.best.per_gpu

    def between(self, gpus: int, efficiency: float) -> tuple[float, float]:
        """Smallest and largest share of a predicted throughput that published runs reached."""
        if gpus <= self.speed.best.gpus:
            return 1.0, 1.0
        low, high = PUBLISHED_OVER_PREDICTED
        return low, max(1.0, min(high, 1 / efficiency))

    def warnings(self, images: int) -> tuple[str, ...]:
        """Return a line if the time of a step is not known for ``images`` per GPU."""
        low, high = self.speed.holds
        if low <= images <= high:
            return ()
        known = f"{low} to {high}" if low < high else f"{low}"
        return (
            f"{images} images per GPU are outside of {known}, for which the time of a step is "
            "known; give --measured with two batch sizes",
        )


class Point(NamedTuple):
    """The prediction for one cluster size."""

    gpus: int
    step: Simulation


def setting(
    loaded: Loaded,
    *,
    gpu: str | None = None,
    links: str | None = None,
    gpus_per_node: int | None = None,
    measured: str | None = None,
    images_per_gpu: int | None = None,
    bus_gbytes: float | None = None,
    fitted: Path | None = None,
    alone: bool = False,
) -> Setting:
    """Collect what clusters share from a recipe and the options of the command line."""
    recipe, preset = loaded.recipe, gpu_named(gpu)
    images = images_per_gpu or recipe.micro_batch_size
    if images is None:
        raise RecipeError(
            "--images-per-gpu: missing, and the recipe has no micro_batch_size; valid: images per "
            "GPU and step"
        )
    speed = find_speed(recipe, gpu, measured)
    profile = step_profile(recipe, speed.step.seconds(images))
    tuned, nccl, sources = (None, None, ()) if alone else _links(preset, links, bus_gbytes, fitted)
    title = f"{recipe.model.name}, {images} images per GPU"
    return Setting(
        f"{title} on {gpu}" if gpu else title,
        profile,
        speed,
        images,
        gpus_per_node or (preset.per_node if preset else 8),
        tuned,
        nccl,
        (
            *speed.sources,
            "time of each layer: proportional to its FLOPs, with two thirds of it in backward",
            *sources,
            f"stragglers: a rank's time varies by {STRAGGLER_SIGMA:.1%} [C]; a step waits for the "
            "slowest",
            "[S]: read in the named source; [C]: computed from such figures; [M]: not verified",
        ),
    )


def step_profile(recipe: Recipe, seconds: float) -> Profile:
    """The layers of a recipe's model, whose step on one GPU takes some seconds."""
    size = recipe.data.image_size
    try:
        with torch.device("meta"):
            model = build_model(recipe.model, recipe.data.classes)
            inputs = [torch.empty(2, 3, size, size)]
        return estimate_profile(model, inputs, seconds, gradient_dtype=gradient_dtype(recipe))
    except RecipeError:
        raise
    except (ValueError, RuntimeError) as error:
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RecipeError(
            f"model.name: {recipe.model.name} cannot be run on the meta device: {line}; valid: a "
            "model whose forward pass does not read values of tensors"
        ) from error


def gradient_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype that DDP reduces, ignoring that norm layers may keep FP32 gradients."""
    if recipe.precision == "auto":
        return torch.float32
    return PRECISIONS[OPT_LEVELS.get(recipe.precision, recipe.precision)].parameters


def _links(
    preset: Gpu | None,
    named: str | None,
    bus_gbytes: float | None,
    fitted: Path | None,
) -> tuple[Links | None, Nccl | None, tuple[str, ...]]:
    """The links that were fitted, or as NCCL sees them, and a line for each number."""
    if fitted is not None:
        if named is not None or bus_gbytes is not None:
            raise RecipeError(
                "--fitted: given together with other options on links; valid: without them"
            )
        try:
            return Tuned.load(fitted).links, None, (f"links: fitted by comm tune, {fitted}",)
        except ValueError as error:
            raise RecipeError(f"--fitted: {error}") from None
    if named is not None:
        names = links_named(named)
    elif preset is not None:
        names = preset.links
    else:
        raise RecipeError("--links: missing; valid: INTRA+INTER, such as nvlink4+ndr-x8, or --gpu")
    intra, inter = INTRA[names[0]], INTER[names[1]]
    between = bus_gbytes or inter.bus_gbytes
    share = "given" if bus_gbytes else f"{between / inter.gbit * 8:.0%} of it"
    nccl = Nccl(
        intra.bus_gbytes,
        between,
        nvlink=names[0].startswith("nvlink"),
        nics=inter.nics,
        tree_gbytes=preset.tree_gbytes if preset else Nccl.tree_gbytes,
    )
    return (
        None,
        nccl,
        (
            f"links inside a node: {intra.gbit:g} Gbit/s ({intra.source}), "
            f"{intra.bus_gbytes:.4g} GB/s bus bandwidth ([S] NCCL's own)",
            f"links between nodes: {inter.gbit:g} Gbit/s ({inter.source}), {between:.4g} GB/s bus "
            f"bandwidth ({share})",
            f"messages: NCCL's own model of rings and trees [S], {1e6 * nccl.host_seconds:g} us "
            "per call on the host (assumed)",
        ),
    )


def sweep(common: Setting, gpus: int, plan: Plan | None = None) -> list[Point]:
    """Predict clusters of 8, 16, 32, … and ``gpus`` GPUs, by default with DDP's all-reduce."""
    if gpus < 2:
        raise RecipeError(f"--gpus: {gpus} needs no all-reduce; valid: 2 or more")
    sizes = [_SMALLEST_GPUS * 2**power for power in range(gpus.bit_length())]
    per_node = common.gpus_per_node
    sizes = [size for size in sizes if size < gpus and size % min(size, per_node) == 0]
    plan = plan or Plan.single("ring")
    return [Point(n, common.simulate(common.profile, n, plan)) for n in (*sizes, gpus)]


def as_json(common: Setting, points: list[Point]) -> dict[str, Any]:
    """Return a sweep with its inputs as JSON data; seconds, bytes and shares from 0 to 1."""
    return {
        "title": common.title,
        "inputs": common.inputs,
        "warnings": common.warnings(common.images),
        "links": common.links and asdict(common.links),
        "nccl": common.nccl and asdict(common.nccl),
        "gpus_per_node": common.gpus_per_node,
        "images_per_gpu": common.images,
        "compute_seconds": common.profile.compute_seconds,
        "gradient_bytes": common.profile.size_bytes,
        "relative_to": asdict(common.speed.best),
        "clusters": [{"gpus": one.gpus, **_values(common, one.gpus, one.step)} for one in points],
    }


def _values(common: Setting, gpus: int, step: Simulation) -> dict[str, Any]:
    each = common.images / step.step_seconds
    efficiency = common.efficiency(each)
    return {
        "step_seconds": step.step_seconds,
        "communication_seconds": step.communication_seconds,
        "exposed_seconds": step.exposed_seconds,
        "waiting_seconds": step.waiting_seconds,
        "images_per_second": gpus * each,
        "efficiency": efficiency,
        "efficiency_between": [efficiency * share for share in common.between(gpus, efficiency)],
        "buckets": len(step.reductions),
    }


def print_summary(common: Setting, points: list[Point]) -> None:
    """Print the inputs and a table with one row per cluster size."""
    columns = ("GPUs", "step (ms)", "exposed", "waiting", "images/s", "efficiency", "range")
    rows = table(*columns, words=None)
    for one in points:
        found = _values(common, one.gpus, one.step)
        low, high = found["efficiency_between"]
        rows.add_row(
            f"{one.gpus:,}",
            *(f"{1e3 * found[f'{key}_seconds']:.1f}" for key in ("step", "exposed", "waiting")),
            f"{found['images_per_second']:,.0f}",
            f"{found['efficiency']:.0%}",
            f"{low:.0%} to {high:.0%}",
        )
    compute = f"{1e3 * common.profile.compute_seconds:.1f} ms without communication"
    lines = [f"{common.title}: {compute}, {common.profile.size_bytes / 1e6:.1f} MB of gradients"]
    lines += [f"  {line}" for line in common.inputs]
    lines += [f"  warning: {line}" for line in common.warnings(common.images)]
    low, high = PUBLISHED_OVER_PREDICTED
    lines += [
        f"  efficiency: relative to {common.speed.best}",
        f"  range: {PUBLISHED_RUNS} published runs reached {low:.2f} to {high:.2f} times what is "
        "predicted",
    ]
    out = console()
    out.print("\n".join(lines), markup=False)
    out.print(rows)
