"""Measure all-reduces and write a plan: ``torchrun [...] -m largebatch.recipes.tune_comm``.

Takes the options of ``largebatch comm tune``, which starts torchrun on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ...comm import WIRE_DTYPES, Links, Profile, Rule, Topology, Tuned, estimate_profile, tune
from ..errors import RecipeError
from ..models.build import build_model
from ..predict.scaling import gradient_dtype
from ..ranks import group_destroyed
from ..schema.load import load

_TIMEOUT = timedelta(seconds=300)


def run(
    out: Path,
    *,
    budget_seconds: float = 110.0,
    wire: Sequence[str] = (),
    ranks_per_node: int | None = None,
    recipe: str | None = None,
    images_per_second: float | None = None,
) -> None:
    """Tune on the ranks that torchrun started; rank 0 writes and tells.

    Args:
        out: the plan's file. Beside it come all measurements (``.tuned.json``), and a picture.
        wire: dtypes that gradients may be sent in.
        ranks_per_node: taken as one node; by default the machines that torchrun reports.
        recipe: of the model that the fusion threshold is chosen for.
        images_per_second: of that model on one rank.

    Raises:
        RecipeError, TopologyError: options that do not exist, or do not fit the ranks.
    """
    check(out, wire=wire, recipe=recipe, images_per_second=images_per_second)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise RecipeError("an all-reduce needs at least 2 ranks; valid: --nproc 2 and up")
    profile = _profile(recipe, images_per_second) if recipe and images_per_second else None
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device else "gloo", timeout=_TIMEOUT, device_id=device)
    with group_destroyed():
        topology = Topology.from_environment(ranks_per_node, timeout=_TIMEOUT)
        tuned = tune(
            topology,
            budget_seconds=budget_seconds,
            wire_dtypes=wire,
            profile=profile,
            progress=lambda line: print(line, flush=True),
        )
        if topology.rank == 0:
            tuned.plan.save(out)
            tuned.save(out.with_suffix(".tuned.json"))
            draw(tuned, out.with_suffix(".png"))
            tell(tuned, by_model=profile is not None)
            print(f"{out}: use it with comm.plan={out}")


def check(
    out: Path, *, wire: Sequence[str], recipe: str | None, images_per_second: float | None
) -> None:
    """Raise RecipeError where the options are wrong, before anything is measured."""
    for name in wire:
        if name not in WIRE_DTYPES:
            raise RecipeError(f"--wire: unknown dtype {name!r}; valid: {', '.join(WIRE_DTYPES)}")
    if out.suffix != ".json" or not out.parent.is_dir():
        raise RecipeError(f"--out: {out} must end in .json, in a folder that is there")
    if (recipe is None) != (images_per_second is None):
        raise RecipeError(
            "--recipe: goes with --images-per-second, what one rank reaches with its model"
        )


def _profile(recipe: str, images_per_second: float) -> Profile:
    found = load(recipe).recipe
    if found.micro_batch_size is None:
        raise RecipeError(f"--recipe: {recipe} has no micro_batch_size")
    with torch.device("meta"):
        model = build_model(found.model, found.data.classes)
        images = torch.empty(2, 3, found.data.image_size, found.data.image_size)
    return estimate_profile(
        model,
        [images],
        found.micro_batch_size / images_per_second,
        gradient_dtype=gradient_dtype(found),
    )


def name_of(rule: Rule) -> str:
    """A candidate, in a few words."""
    parts = [rule.algorithm]
    if rule.shape:
        parts.append("x".join(map(str, rule.shape)))
    if rule.chunk_bytes:
        parts.append(f"in chunks of {size_of(rule.chunk_bytes)}")
    if rule.wire_dtype:
        parts.append(f"as {rule.wire_dtype}")
    return " ".join(parts)


def size_of(size_bytes: int) -> str:
    """A size with its unit."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 2**power:
            return f"{size_bytes / 2**power:.4g} {unit}"
    return f"{size_bytes} B"


def tell(tuned: Tuned, *, by_model: bool = False) -> None:
    """Print what was measured, what the links are, and the plan."""
    rules = list(dict.fromkeys(m.rule for m in tuned.measurements))
    sizes = sorted({m.size_bytes for m in tuned.measurements})
    times = {(m.size_bytes, m.rule): m.median_seconds for m in tuned.measurements}
    table = Table(box=None, pad_edge=False, title="ms, median of the slowest rank")
    table.add_column("")
    for size in sizes:
        table.add_column(size_of(size), justify="right")
    for rule in rules:
        cells = []
        for size in sizes:
            seconds = times.get((size, rule))
            chosen = tuned.plan.rule_for(size)
            text = "" if seconds is None else f"{1e3 * seconds:.3g}"
            cells.append(f"[bold]{text}*[/bold]" if name_of(chosen) == name_of(rule) else text)
        table.add_row(name_of(rule), *cells)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    console.print(table)
    for line in told_links(tuned.links):
        console.print(line, markup=False)
    console.print(
        f"links alone tell a measured time to {tuned.fit_error:.0%} (median)", markup=False
    )
    for note in tuned.notes:
        console.print(f"note: {note}", markup=False)
    for rule in tuned.plan.rules:
        limit = f"up to {size_of(rule.max_bytes)}" if rule.max_bytes else "any larger size"
        console.print(f"plan: {limit}: {name_of(rule)}", markup=False)
    why = (
        "the shortest simulated step"
        if by_model
        else "the smallest size within 3 % of the best rate; --recipe chooses it for a model"
    )
    console.print(
        f"plan: gradients fused up to {size_of(tuned.plan.fusion_threshold_bytes)}: {why}",
        markup=False,
    )


def told_links(links: Links) -> list[str]:
    """A line for each level of link."""
    lines = []
    for where, level in (("inside a node", links.intra), ("between nodes", links.inter)):
        if level is not None:
            rate = f"{level.gbit:.3g} Gbit/s" if level.seconds_per_byte else "no time per byte"
            lines.append(f"links {where}: {level.latency_us:.3g} us, {rate}")
    if links.host_seconds_per_byte:
        shared = 8e-9 / links.host_seconds_per_byte
        lines.append(f"shared by a node's ranks: {shared:.3g} Gbit/s of what they send inside it")
    return lines


def draw(tuned: Tuned, out: Path) -> None:
    """Draw the time of each candidate against the size, and what the plan takes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    by_rule: dict[Rule, list[tuple[int, float]]] = {}
    for m in tuned.measurements:
        by_rule.setdefault(m.rule, []).append((m.size_bytes, 1e3 * m.median_seconds))
    colors: dict[str, str] = {}
    markers: dict[int | None, str] = {}
    for rule, points in by_rule.items():
        color = colors.setdefault(rule.algorithm, f"C{len(colors)}")
        marker = markers.setdefault(rule.chunk_bytes, ".sD^v"[len(markers) % 5])
        x, y = zip(*points, strict=True)
        axes.plot(
            x,
            y,
            ":" if rule.wire_dtype else "-",
            color=color,
            marker=marker,
            markersize=5,
            label=name_of(rule),
            linewidth=1,
        )
    chosen = [
        (m.size_bytes, 1e3 * m.median_seconds)
        for m in tuned.measurements
        if name_of(tuned.plan.rule_for(m.size_bytes)) == name_of(m.rule)
    ]
    x, y = zip(*chosen, strict=True)
    axes.plot(x, y, "o", ms=11, mfc="none", mec="black", label="the plan")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({m.size_bytes for m in tuned.measurements})
    axes.set_xticks(sizes, [size_of(size) for size in sizes], rotation=45)
    axes.set_xlabel("message")
    axes.set_ylabel("ms, median of the slowest rank")
    nodes = " + ".join(str(len(node)) for node in tuned.cluster.topology.nodes)
    axes.set_title("\n".join([f"nodes of {nodes} ranks", *told_links(tuned.links)]), fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    try:
        figure.savefig(out, dpi=110)
    except (OSError, ValueError) as error:
        raise RecipeError(f"--out: cannot write {out}: {error}") from None
