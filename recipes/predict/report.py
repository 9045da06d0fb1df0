"""Report a scaling sweep as a table, a figure, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...comm import Simulation
from ..errors import RecipeError
from .scaling import Point, Setting


def as_json(common: Setting, points: Sequence[Point]) -> dict[str, Any]:
    """Return the sweep with its inputs as JSON data."""

    def values(simulation: Simulation) -> dict[str, Any]:
        return {
            "step_seconds": simulation.step_seconds,
            "communication_seconds": simulation.communication_seconds,
            "exposed_seconds": simulation.exposed_seconds,
            "waiting_seconds": simulation.waiting_seconds,
            "efficiency": simulation.efficiency,
            "buckets": len(simulation.reductions),
        }

    return {
        "title": common.title,
        "inputs": common.inputs,
        "warnings": common.warnings(common.images),
        "links": asdict(common.links),
        "nccl": asdict(common.nccl) if common.nccl else None,
        "gpus_per_node": common.gpus_per_node,
        "images_per_gpu": common.images,
        "compute_seconds": common.profile.compute_seconds,
        "gradient_bytes": common.profile.size_bytes,
        "clusters": [
            {
                "gpus": p.gpus,
                "images_per_second": p.gpus * common.images / p.planned.step_seconds,
                "plan": asdict(p.plan),
                "planned": values(p.planned),
                _default(common): values(p.default),
                "unfused_ring": values(p.unfused),
            }
            for p in points
        ],
    }


def _default(common: Setting) -> str:
    """Name of the back end's own all-reduce."""
    return "nccl" if common.nccl else "ring"


def print_summary(common: Setting, points: Sequence[Point]) -> None:
    """Print the inputs and a table with one row per cluster size."""
    table = Table(box=None, pad_edge=False)
    default = _default(common)
    for column in (
        "GPUs",
        "step (ms)",
        "exposed",
        "waiting",
        "images/s",
        "efficiency",
        f"{default}, 25 MiB buckets",
        "unfused flat ring",
    ):
        table.add_column(column, justify="right")
    table.add_column("buckets by algorithm")
    for p in points:
        counts: dict[str, int] = {}
        for reduction in p.planned.reductions:
            name = reduction.rule.algorithm
            name = default if name == "ring" else name
            counts[name] = counts.get(name, 0) + 1
        table.add_row(
            f"{p.gpus:,}",
            f"{1e3 * p.planned.step_seconds:.1f}",
            f"{1e3 * p.planned.exposed_seconds:.1f}",
            f"{1e3 * p.planned.waiting_seconds:.1f}",
            f"{p.gpus * common.images / p.planned.step_seconds:,.0f}",
            f"{p.planned.efficiency:.1%}",
            f"{p.default.efficiency:.1%}",
            f"{p.unfused.efficiency:.1%}",
            ", ".join(f"{n} {name}" for name, n in counts.items()),
        )
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160  # do not wrap lines in a file or a pipe
    compute = f"{1e3 * common.profile.compute_seconds:.1f} ms without communication"
    console.print(
        f"{common.title}: {compute}, {common.profile.size_bytes / 1e6:.1f} MB of gradients",
        markup=False,
    )
    for line in common.inputs:
        console.print(f"  {line}", markup=False)
    for line in common.warnings(common.images):
        console.print(f"  warning: {line}", markup=False)
    console.print(table)


def _legend(axes: Any) -> None:
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2)


def draw(common: Setting, points: Sequence[Point], out: Path) -> None:
    """Plot scaling efficiency and the parts of a step over the number of GPUs.

    Args:
        common: the settings of the sweep.
        points: its cluster sizes.
        out: image file; the suffix selects the format, such as ``.png``.

    Raises:
        RecipeError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    gpus = [p.gpus for p in points]
    planned = "given plan" if common.plan else "plan chosen by the model"
    for name, color, runs in (
        (planned, "tab:green", [p.planned for p in points]),
        (f"{_default(common)}, 25 MiB buckets", "tab:gray", [p.default for p in points]),
        ("unfused flat ring, the paper's baseline", "tab:red", [p.unfused for p in points]),
    ):
        left.plot(gpus, [100 * r.efficiency for r in runs], "o-", ms=4, color=color, label=name)
    left.set_ylim(0, 103)
    left.set_ylabel("scaling efficiency (%)")
    _legend(left)
    compute = 1e3 * common.profile.compute_seconds
    exposed = [1e3 * p.planned.exposed_seconds for p in points]
    total_communication = [1e3 * p.planned.communication_seconds for p in points]
    right.fill_between(gpus, compute, color="tab:blue", alpha=0.35, linewidth=0, label="compute")
    late = [compute + 1e3 * p.planned.waiting_seconds for p in points]
    total = [base + e for base, e in zip(late, exposed, strict=True)]
    for low, high, color, label in (
        ([compute] * len(late), late, "tab:purple", "waiting for the slowest GPU"),
        (late, total, "tab:red", "exposed communication"),
    ):
        right.fill_between(gpus, low, high, color=color, alpha=0.5, linewidth=0, label=label)
    right.plot(
        gpus,
        total_communication,
        "--",
        color="tab:orange",
        label="all communication, hidden part included",
    )
    right.set_ylim(0, 1.15 * max(*total, *total_communication))
    right.set_ylabel("time per step (ms)")
    right.set_title(planned, fontsize="medium")
    _legend(right)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [f"{n:,}" for n in gpus], rotation=45)
        axes.set_xlabel("number of GPUs")
        axes.grid(alpha=0.3)
    figure.suptitle(f"Predicted scaling (not measured): {common.title}")
    try:
        figure.savefig(out, dpi=110)
    except (OSError, ValueError) as error:
        raise RecipeError(f"--out: cannot write {out}: {error}") from None
