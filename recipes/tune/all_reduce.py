"""Measure all-reduces and write a plan, as ``largebatch comm tune`` does.

That command starts torchrun on this machine. On several machines, run
``torchrun [...] -m largebatch.recipes comm tune``, which takes the same options.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ...comm import (
    SUM_DTYPES,
    WIRE_DTYPES,
    Final,
    Links,
    Topology,
    Tuned,
    order_launches,
    tune,
)
from ..errors import RecipeError
from ..output import console, table, writing
from ..predict.scaling import step_profile
from ..ranks import group_destroyed
from ..schema.load import load
from ..words import binary_size, describe_rule

_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Options:
    """What the user asked for; names and meaning are those of the command's options."""

    out: Path  # of the plan; measurements (``.tuned.json``) and a figure (``.png``) go beside it
    budget_seconds: float = 110.0
    race_seconds: float = 60.0
    wire: Sequence[str] = ()
    sum_dtype: str | None = None
    ranks_per_node: int | None = None
    recipe: str | None = None
    images_per_second: float | None = None

    def check(self) -> None:
        """Check what can be known before ranks connect; their number only under torchrun."""
        dtypes = [("wire", name, WIRE_DTYPES) for name in self.wire]
        dtypes += [("sum-dtype", self.sum_dtype, SUM_DTYPES)] if self.sum_dtype else []
        for option, name, valid in dtypes:
            if name not in valid:
                raise RecipeError(f"--{option}: unknown dtype {name!r}; valid: {', '.join(valid)}")
        if self.sum_dtype is not None and not self.wire:
            raise RecipeError(
                "--sum-dtype: nothing is sent in half precision; valid with: --wire fp16 or bf16"
            )
        if self.out.suffix != ".json" or not self.out.parent.is_dir():
            raise RecipeError(
                f"--out: cannot write a plan to {self.out}; valid: a .json file in an existing "
                "folder"
            )
        if (self.recipe is None) != (self.images_per_second is None):
            raise RecipeError("--recipe: must be given together with --images-per-second")
        if "RANK" in os.environ:
            world_size = int(os.environ["WORLD_SIZE"])
            if world_size < 2:
                raise RecipeError("--nproc: 1 rank has nothing to all-reduce; valid: 2 or more")
            if self.ranks_per_node is not None:
                Topology.of(world_size, self.ranks_per_node)


def run(options: Options) -> None:
    """Tune on the ranks that torchrun started; rank 0 writes the files and prints a summary."""
    options.check()
    profile = None
    if options.recipe is not None and options.images_per_second is not None:
        recipe = load(options.recipe).recipe
        if recipe.micro_batch_size is None:
            raise RecipeError(
                f"--recipe: {options.recipe} has no micro_batch_size; valid: a recipe that has one"
            )
        profile = step_profile(recipe, recipe.micro_batch_size / options.images_per_second)
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        order_launches()  # for candidates in chunks
    dist.init_process_group("nccl" if device else "gloo", timeout=_TIMEOUT, device_id=device)
    with group_destroyed():
        topology = Topology.from_environment(options.ranks_per_node)
        tuned = tune(
            topology,
            budget_seconds=options.budget_seconds,
            race_seconds=options.race_seconds,
            wire_dtypes=options.wire,
            sum_dtype=options.sum_dtype,
            profile=profile,
            progress=lambda line: print(line, flush=True),
        )
        if topology.rank == 0:
            tuned.plan.save(options.out)
            tuned.save(options.out.with_suffix(".tuned.json"))
            draw(tuned, options.out.with_suffix(".png"))
            print_summary(tuned)
            print(f"{options.out}: train with it by comm.plan={options.out}")


def print_summary(tuned: Tuned) -> None:
    """Print the measurements, the fitted links and the plan."""
    plan = tuned.plan
    sizes = sorted({m.size_bytes for m in tuned.measurements})
    times = {(m.size_bytes, m.rule): m.median_seconds for m in tuned.measurements}
    title = "all-reduce time on the slowest rank, median, ms"
    found = table("* the plan's choice", *map(binary_size, sizes), title=title)
    for rule in dict.fromkeys(m.rule for m in tuned.measurements):
        cells = []
        for size in sizes:
            text = f"{1e3 * times[size, rule]:.3g}" if (size, rule) in times else ""
            chosen = describe_rule(plan.rule_for(size)) == describe_rule(rule)
            cells.append(f"[bold]{text}*[/bold]" if chosen else text)
        found.add_row(describe_rule(rule), *cells)
    out = console()
    out.print(found)
    lines = [
        *describe_links(tuned.links),
        f"median error of the fitted links on measured times: {tuned.fit_error:.0%}",
        *(describe_race(tuned.final) if tuned.final is not None else ()),
        *(f"note: {note}" for note in tuned.notes),
    ]
    for rule in plan.rules:
        limit = f"up to {binary_size(rule.max_bytes)}" if rule.max_bytes else "any larger size"
        lines.append(f"plan: {limit}: {describe_rule(rule)}")
    lines.append(f"plan: fusion threshold {binary_size(plan.fusion_threshold_bytes)}")
    for line in lines:
        out.print(line, markup=False)


def describe_race(final: Final) -> list[str]:
    """Describe the race of the best plans: one line on the whole, and one for each plan."""
    lines = [f"race under a backward pass of {final.backward_seconds:.3g} s (range of the rounds):"]
    for index, finalist in enumerate(final.finalists):
        if not finalist.seconds:
            result = "no time was left"
        else:
            rounds = len(finalist.seconds)
            result = f"{statistics.median(finalist.seconds):.3g} s in {rounds} rounds"
            if index == final.fastest:
                result += ", fastest"
            else:
                ratios = final.ratios(index)
                result += f", {statistics.median(ratios):.2f} of the fastest"
                result += f" ({min(ratios):.2f} to {max(ratios):.2f})"
        mark = "* " if index == final.winner else "  "
        rules = ", then ".join(describe_rule(rule) for rule in finalist.plan.rules)
        size = binary_size(finalist.plan.fusion_threshold_bytes)
        lines.append(f"{mark}{rules}, buckets of {size}: {result}")
    return lines


def describe_links(links: Links) -> list[str]:
    """Describe each link level in one line."""
    lines = []
    for where, level in (("inside a node", links.intra), ("between nodes", links.inter)):
        if level is not None:
            rate = f"{level.gbit:.3g} Gbit/s" if level.seconds_per_byte else "no time per byte"
            lines.append(f"links {where}: {level.latency_us:.3g} us, {rate}")
    if links.host_seconds_per_byte:
        shared = 8e-9 / links.host_seconds_per_byte
        lines.append(f"links inside a node share the host: {shared:.3g} Gbit/s for all ranks")
    return lines


def draw(tuned: Tuned, out: Path) -> None:
    """Plot the time of each candidate over the message size, and mark the plan's choices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots()
    measured, sizes = tuned.measurements, sorted({m.size_bytes for m in tuned.measurements})
    for index, rule in enumerate(dict.fromkeys(m.rule for m in measured)):
        own = sorted((m.size_bytes, 1e3 * m.median_seconds) for m in measured if m.rule == rule)
        look = f"C{index % 10}" + ".sDv"[index // 10 % 4] + (":" if rule.wire_dtype else "-")
        axes.plot(*zip(*own, strict=True), look, ms=5, label=describe_rule(rule))
    for m in measured:
        if describe_rule(tuned.plan.rule_for(m.size_bytes)) == describe_rule(m.rule):
            axes.plot(m.size_bytes, 1e3 * m.median_seconds, "ko", ms=11, mfc="none")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [binary_size(size) for size in sizes], rotation=45)
    axes.set_xlabel("message size")
    axes.set_ylabel("median time on the slowest rank (ms)")
    nodes = " + ".join(str(len(node)) for node in tuned.cluster.topology.nodes)
    title = f"All-reduce on {len(tuned.cluster.topology.nodes)} nodes with {nodes} ranks"
    lines = [f"{title}; circles: the plan's choices", *describe_links(tuned.links)]
    axes.set_title("\n".join(lines), fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    with writing(out):
        figure.savefig(out, dpi=110)
