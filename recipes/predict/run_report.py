"""Report the plan of a run as tables, a picture, or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import RecipeError
from ..training.memory import UNCOUNTED, Memory
from ..words import duration
from .assumptions import compared_with_published
from .run_plan import Point, RunPlan

#: Width of the tables where the terminal does not say one, in characters.
WIDTH = 100
_MB = 1e6

#: Parts of the memory: attribute, heading, and colour in the picture.
_PARTS = (
    ("parameters", "params", "tab:blue"),
    ("gradients", "gradients", "tab:orange"),
    ("masters", "masters", "tab:cyan"),
    ("state", "optimizer", "tab:green"),
    ("ema", "EMA", "tab:olive"),
    ("buckets", "buckets", "tab:brown"),
    ("activations", "activations", "tab:purple"),
    ("temporary", "other", "tab:gray"),
)


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Return the plan with its inputs as JSON data; seconds, bytes and shares from 0 to 1."""
    return {
        "recipe": plan.name,
        "gpu": plan.gpu,
        "precision": plan.precision,
        "epochs": plan.epochs,
        "steps": plan.steps,
        "evaluations": plan.evaluations,
        "checkpoints": plan.checkpoints,
        "price_per_gpu_hour": plan.price,
        "inputs": plan.inputs,
        "published": compared_with_published(),
        "not_counted": UNCOUNTED,
        "gpus": [_point(point) for point in plan.points],
    }


def _point(point: Point) -> dict[str, Any]:
    times = point.times
    return {
        "gpus": point.gpus,
        "batch_size": point.recipe.batch_size,
        "micro_batch_size": point.micro_batch_size,
        "accumulation": point.accumulation,
        "images_per_gpu": point.micro_batch_size * point.accumulation,
        "batch_norm_images": point.batch_norm_images,
        "reduced_bytes": point.reduced_bytes,
        "step_seconds": times.step_seconds,
        "efficiency": times.efficiency,
        "images_per_second": point.recipe.batch_size / times.step_seconds,
        "training_seconds": times.compute + times.exposed + times.waiting,
        "evaluation_seconds": times.evaluation,
        "checkpoint_seconds": times.checkpoints,
        "total_seconds": times.total,
        "cost": point.cost,
        "memory": [asdict(memory) for memory in point.memory],
        "assumptions": [
            {
                "name": effect.assumption.name,
                "used": effect.assumption.used,
                "otherwise": effect.assumption.otherwise,
                "low_seconds": effect.low,
                "high_seconds": effect.high,
            }
            for effect in point.effects
        ],
        "notices": point.notices,
    }


def print_summary(plan: RunPlan) -> None:
    """Print the inputs and the tables: the step, the run, the memory and the assumptions."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDTH
    gpu = f" on {plan.gpu}" if plan.gpu else ""
    batches = {phase.batch_size for phase in plan.points[0].timeline.phases}
    batch = ", ".join(f"{size:,}" for size in sorted(batches))
    say = _sayer(console)
    say(
        f"{plan.name}{gpu}: batch {batch}, {plan.epochs:.4g} epochs, {plan.steps:,} steps, "
        f"{plan.evaluations} evaluations, {plan.checkpoints} checkpoints"
    )
    for line in plan.inputs:
        say(line, "  ")
    console.print()
    console.print(_steps(plan.points))
    console.print()
    console.print(_times(plan.points))
    say("range: with the other values of the assumption that dominates, below", "  ")
    console.print()
    for points, memory in _by_memory(plan.points):
        names = ", ".join(f"{point.gpus:,}" for point in points)
        say(
            f"memory per GPU in MB, micro-batch {memory[0].micro_batch_size}, for {names} GPUs "
            f"(* the recipe's precision)"
        )
        console.print(_memory(memory, plan.precision))
    say("other: temporary tensors; peak: the largest sum at one time, counted in tensors", "  ")
    say(f"not counted: {'; '.join(UNCOUNTED)}", "  ")
    console.print()
    console.print(_assumptions(plan.points))
    largest = plan.points[-1]
    for point in plan.points:
        effect = point.effects[0]
        say(
            f"{point.gpus:,} GPUs: the assumption that dominates: {effect.assumption.name}: "
            f"{effect.assumption.used}; {effect.assumption.otherwise}: {duration(effect.low)} to "
            f"{duration(effect.high)}"
        )
        if point is not largest and largest.effects[0].assumption is effect.assumption:
            break
    say(compared_with_published())
    for notice in dict.fromkeys(line for point in plan.points for line in point.notices):
        say(notice)


def _sayer(console: Console) -> Any:
    def say(line: str, indent: str = "") -> None:
        from textwrap import fill

        further = indent + "  "
        text = fill(line, console.width, initial_indent=indent, subsequent_indent=further)
        console.print(text, markup=False, soft_wrap=True)

    return say


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _steps(points: Sequence[Point]) -> Table:
    table = _table(
        *("GPUs", "micro-batch", "accumulated", "batch norm", "reduced (MB)"),
        *("step (ms)", "efficiency", "images/s"),
    )
    for point in points:
        times = point.times
        table.add_row(
            f"{point.gpus:,}",
            f"{point.micro_batch_size:,}",
            f"{point.accumulation:,}",
            f"{point.batch_norm_images:,}" if point.batch_norm_images else "-",
            f"{point.reduced_bytes / _MB:.1f}",
            f"{1e3 * times.step_seconds:,.1f}",
            f"{times.efficiency:.1%}",
            f"{point.recipe.batch_size / times.step_seconds:,.0f}",
        )
    return table


def _times(points: Sequence[Point]) -> Table:
    cost = ["cost"] if points[0].cost is not None else []
    table = _table("GPUs", "training", "evaluation", "checkpoints", "time to train", "range", *cost)
    for point in points:
        times, effect = point.times, point.effects[0]
        table.add_row(
            f"{point.gpus:,}",
            duration(times.compute + times.exposed + times.waiting),
            f"{duration(times.evaluation)} ({times.evaluation / times.total:.0%})",
            f"{duration(times.checkpoints)} ({times.checkpoints / times.total:.0%})",
            duration(times.total),
            f"{duration(effect.low)} to {duration(effect.high)}",
            *([f"{point.cost:,.2f}"] if point.cost is not None else []),
        )
    return table


def _by_memory(
    points: Sequence[Point],
) -> Iterable[tuple[list[Point], tuple[Memory, ...]]]:
    """The numbers of GPUs that need the same memory, together."""
    found: dict[tuple[Memory, ...], list[Point]] = {}
    for point in points:
        found.setdefault(point.memory, []).append(point)
    return ((group, memory) for memory, group in found.items())


def _memory(memory: Sequence[Memory], own: str) -> Table:
    parts = [part for part in _PARTS if any(getattr(one, part[0]) != 0 for one in memory)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("precision")
    for _, heading, _ in parts:
        table.add_column(heading, justify="right")
    table.add_column("peak", justify="right")
    for one in memory:
        row = [_megabytes(getattr(one, name)) for name, _, _ in parts]
        mark = "*" if one.precision == own else ""
        peak = _megabytes(one.peak)
        table.add_row(one.precision + mark, *row, f"> {peak}" if one.state is None else peak)
    return table


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / _MB:,.0f}"


def _assumptions(points: Sequence[Point]) -> Table:
    """What each assumption changes, for the smallest and the largest number of GPUs."""
    shown = [points[0], *points[-1:]] if len(points) > 1 else [*points]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("changes the time to train")
    for point in shown:
        table.add_column(f"{point.gpus:,} GPUs", justify="right")
    for effect in points[-1].effects:
        cells = []
        for point in shown:
            same = next(e for e in point.effects if e.assumption is effect.assumption)
            low, high = (value / point.times.total - 1 for value in (same.low, same.high))
            cells.append(f"{low:+.0%} to {high:+.0%}".replace("-0%", "0%").replace("+0%", "0%"))
        table.add_row(effect.assumption.name, *cells)
    return table


def draw(plan: RunPlan, out: Path) -> None:
    """Plot the time to train over the number of GPUs, and the memory by precision.

    Args:
        plan: The plan.
        out: Image file; the suffix selects the format, such as ``.png``.

    Raises:
        RecipeError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_times(plan, left)
    _draw_memory(plan, right)
    gpu = f" on {plan.gpu}" if plan.gpu else ""
    figure.suptitle(f"Plan of {plan.name}{gpu} (predicted, not measured)")
    try:
        figure.savefig(out, dpi=110)
    except (OSError, ValueError) as error:
        raise RecipeError(f"--out: cannot write {out}: {error}") from None


def _draw_times(plan: RunPlan, axes: Any) -> None:
    """GPU hours, which stay alike where a run scales; the time to train is written above."""
    points = plan.points
    hours = [point.gpus / 3600 for point in points]
    places = range(len(points))
    bottom = [0.0] * len(points)
    for part, label, color in (
        ("compute", "computation", "tab:blue"),
        ("exposed", "exposed communication", "tab:red"),
        ("waiting", "waiting for the slowest", "tab:purple"),
        ("evaluation", "evaluation", "tab:orange"),
        ("checkpoints", "checkpoints", "tab:gray"),
    ):
        heights = [getattr(p.times, part) * h for p, h in zip(points, hours, strict=True)]
        axes.bar(places, heights, bottom=bottom, label=label, color=color, alpha=0.8, width=0.6)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    low = [p.effects[0].low * h for p, h in zip(points, hours, strict=True)]
    high = [p.effects[0].high * h for p, h in zip(points, hours, strict=True)]
    ranges = [
        [max(0.0, b - value) for b, value in zip(bottom, low, strict=True)],
        [max(0.0, value - b) for b, value in zip(bottom, high, strict=True)],
    ]
    label = "range by the assumption that dominates"
    axes.errorbar(places, bottom, yerr=ranges, fmt="none", ecolor="black", capsize=5, label=label)
    tops = [max(pair) for pair in zip(bottom, high, strict=True)]
    for place, point, top in zip(places, points, tops, strict=True):
        text = f"{duration(point.times.total)}\n{point.times.efficiency:.1%} efficient"
        axes.annotate(
            text, (place, top), (0, 5), textcoords="offset points", ha="center", fontsize="small"
        )
    axes.set_ylim(0, 1.2 * max(tops))
    axes.set_xlim(-0.7, len(points) - 0.3)
    axes.set_xticks(places, [f"{point.gpus:,}" for point in points])
    axes.set_xlabel("number of GPUs")
    axes.set_ylabel("GPU hours")
    axes.set_title("time to train, and what the GPUs do in it", fontsize="medium")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _draw_memory(plan: RunPlan, axes: Any) -> None:
    point = max(plan.points, key=lambda p: max(one.peak for one in p.memory))
    memory = point.memory[::-1]
    left = [0.0] * len(memory)
    for name, heading, color in _PARTS:
        widths = [(getattr(one, name) or 0) / 1e9 for one in memory]
        if any(widths):
            axes.barh(range(len(memory)), widths, left=left, label=heading, color=color, alpha=0.8)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    peaks = [one.peak / 1e9 for one in memory]
    axes.plot(peaks, range(len(memory)), "k|", ms=22, label="peak")
    for place, peak in enumerate(peaks):
        at = max(peak, left[place])
        axes.annotate(f"{peak:.2f}", (at, place), (6, 0), textcoords="offset points", va="center")
    widest = max([*left, *peaks])
    if plan.memory_gb is not None and plan.memory_gb < 1.6 * widest:
        widest = max(widest, plan.memory_gb)
        axes.axvline(plan.memory_gb, color="tab:red", linestyle="--", label="memory of the GPU")
    axes.set_xlim(0, 1.15 * widest)
    marks = ["*" if one.precision == plan.precision else "" for one in memory]
    names = [one.precision + mark for one, mark in zip(memory, marks, strict=True)]
    axes.set_yticks(range(len(memory)), names)
    axes.set_xlabel(f"memory per GPU (GB), {point.gpus:,} GPUs, * the recipe's precision")
    axes.set_title(f"micro-batch {memory[0].micro_batch_size}", fontsize="medium")
    axes.legend(
        fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, markerscale=0.4
    )
