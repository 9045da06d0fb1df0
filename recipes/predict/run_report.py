"""Report the plan of a run as tables or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from textwrap import fill
from typing import Any

from rich.console import Console
from rich.table import Table

from ..words import decimal_size, duration
from .memory import UNCOUNTED
from .run_plan import Point, RunPlan

#: Width of the tables where the terminal does not say one, in characters.
_WIDTH = 100


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Return the plan with its inputs as JSON data; seconds, bytes and shares from 0 to 1."""
    shared = {name: value for name, value in vars(plan).items() if name != "points"}
    return {**shared, "not_counted": UNCOUNTED, "points": [_point(point) for point in plan.points]}


def _point(point: Point) -> dict[str, Any]:
    names = (
        *("gpus", "micro_batch_size", "accumulation", "batch_norm_images", "reduced_bytes"),
        *("efficiency", "images_per_second", "input_per_node", "cost", "notices"),
    )
    total = {"total": point.times.total, "total_between": point.between}
    return {
        **{name: getattr(point, name) for name in names},
        "seconds": asdict(point.times) | total,
        "memory": asdict(point.memory),
        "assumptions": [asdict(one) for one in point.assumptions],
    }


def print_summary(plan: RunPlan) -> None:
    """Print the time to train, the inputs, and tables of the step and the run."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = _WIDTH

    def say(line: str, indent: str = "") -> None:
        text = fill(line, console.width, initial_indent=indent, subsequent_indent=indent + "  ")
        console.print(text, markup=False, soft_wrap=True)

    points = plan.points
    batches = sorted({phase.batch_size for phase in points[0].timeline.phases})
    say(
        f"{plan.name}{f' on {plan.gpu}' if plan.gpu else ''}: batch "
        f"{', '.join(f'{size:,}' for size in batches)}, {plan.epochs:.4g} epochs, "
        f"{plan.steps:,} steps, {plan.evaluations} evaluations, {plan.checkpoints} checkpoints"
    )
    for line in plan.inputs:
        say(line, "  ")
    console.print()
    console.print(_steps(points))
    say(f"efficiency: relative to {plan.relative_to}", "  ")
    say("input: images that each node must read and decode for that", "  ")
    console.print()
    console.print(_times(points))
    say(f"range: by all assumptions; with {points[-1].gpus:,} GPUs by each of them alone:", "  ")
    for one in points[-1].assumptions:
        low, high = (value / points[-1].times.total - 1 for value in (one.low, one.high))
        if low or high:
            say(f"{low:+.0%} to {high:+.0%} by {one.name}: {one.otherwise}", "    ")
    say(
        f"memory: per GPU in {plan.precision}, counted in tensors; not counted: "
        f"{'; '.join(UNCOUNTED)}",
        "  ",
    )
    for notice in dict.fromkeys(line for point in points for line in point.notices):
        say(notice)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:  # a heading of several words may wrap; one word must not be cut
        table.add_column(column, justify="right", no_wrap=" " not in column)
    return table


def _steps(points: Sequence[Point]) -> Table:
    table = _table(
        *("GPUs", "micro-batch", "accumulated", "batch norm", "reduced (MB)"),
        *("memory", "step (ms)", "images/s", "efficiency", "input"),
    )
    for point in points:
        table.add_row(
            f"{point.gpus:,}",
            f"{point.micro_batch_size:,}",
            f"{point.accumulation:,}",
            f"{point.batch_norm_images:,}" if point.batch_norm_images else "-",
            f"{point.reduced_bytes / 1e6:.1f}",
            (">" if point.memory.state is None else "") + decimal_size(point.memory.peak),
            f"{1e3 * point.times.step:,.1f}",
            f"{point.images_per_second:,.0f}",
            f"{point.efficiency:.0%}",
            f"{point.input_per_node:,.0f}/s",
        )
    return table


def _times(points: Sequence[Point]) -> Table:
    cost = ["cost"] if points[0].cost is not None else []
    table = _table("GPUs", "time to train", "range", "training", "evaluation", "checkpoints", *cost)
    for point in points:
        times = point.times
        table.add_row(
            f"{point.gpus:,}",
            duration(times.total),
            " to ".join(duration(end) for end in point.between),
            duration(times.training),
            *(
                f"{duration(part)} ({part / times.total:.0%})"
                for part in (times.evaluation, times.checkpoints)
            ),
            *([f"{point.cost:,.2f}"] if point.cost is not None else []),
        )
    return table
