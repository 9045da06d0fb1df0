"""Render batch_price.json as tables and a plot."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
from scipy.stats import t

from benchmarks.recipes.crossing import Crossing, Target, crossing
from benchmarks.recipes.large_batch_report import finals
from benchmarks.recipes.large_batch_single import Rows

IMAGES = 50_000
GRID_EPOCHS = 20
SMALL = 256

#: The goal: at most this many times the epochs of the small batch, by batch size.
GOALS = {2560: 1.6}

#: Epochs of MLPerf Training's reference runs of ResNet-50 at 65,536, which has 19.5 updates per
#: epoch as 2,560 has here, and at 8,192 and 1,632, which have 156 and 785 (256 has 195 here).
MLPERF, MLPERF_SMALLER = 84.5, {8192: 42.0, 1632: 35.0}

COLORS = ("tab:blue", "tab:orange", "tab:green")


def points(rows: Rows, grid: Rows, batch_size: int) -> Rows:
    """Return the runs of LARS at a batch size, of every length, as rows with ``epochs``."""
    short = [row | {"epochs": GRID_EPOCHS} for row in finals(grid, "lars", batch_size)]
    return short + [row for row in rows if row["batch_size"] == batch_size]


def target_of(rows: Rows, grid: Rows) -> Target:
    """Return the accuracy of the small batch."""
    return Target.mean_of([row["top1"] for row in points(rows, grid, SMALL)])


def larger(rows: Rows) -> list[int]:
    """Return the batch sizes whose price is asked for."""
    return sorted({row["batch_size"] for row in rows} - {SMALL})


def price(runs: Rows, target: Target) -> Crossing | None:
    """Return the epochs at which runs meet the target, or None if they are too few."""
    lengths, top1 = [row["epochs"] for row in runs], [row["top1"] for row in runs]
    try:
        return crossing(lengths, top1, target)
    except ValueError:
        return None


def table(rows: Rows, grid: Rows) -> str:
    """Tabulate the accuracy of each length, and its difference from the target."""
    target = target_of(rows, grid)
    lines = [
        "| batch | updates per epoch | epochs | top-1 % on the test set | seeds "
        "| minus the target, 95 % interval | |",
        "|---:|---:|---:|---:|---:|---:|---|",
    ]
    for batch_size in larger(rows):
        runs = points(rows, grid, batch_size)
        for epochs in sorted({row["epochs"] for row in runs}):
            top1 = [row["top1"] for row in runs if row["epochs"] == epochs]
            spread = f" ± {statistics.stdev(top1):.2f}" if len(top1) > 1 else ""
            lines.append(
                f"| {batch_size:,} | {IMAGES / batch_size:.1f} | {epochs} "
                f"| {statistics.mean(top1):.2f}{spread} | {len(top1)} | {_difference(top1, target)}"
            )
    lines += [
        "",
        f"The target is {target.top1:.2f} %: LARS at {SMALL} in {GRID_EPOCHS} epochs, "
        f"{int(target.freedom) + 1} seeds. Values after ± are standard deviations.",
    ]
    return "\n".join(lines) + "\n"


def _difference(top1: list[float], target: Target) -> str:
    """The last two cells of a row: Welch's interval of a difference, and what it resolves."""
    if len(top1) < 2:
        return " | one seed |"
    here = Target.mean_of(top1)
    ahead = here.top1 - target.top1
    error = math.hypot(here.error, target.error)
    freedom = error**4 / (here.error**4 / here.freedom + target.error**4 / target.freedom)
    half = float(t.ppf(0.975, freedom)) * error
    verdict = "unresolved" if abs(ahead) < half else "above" if ahead > 0 else "below"
    return f"{ahead:+.2f}, {ahead - half:+.2f} to {ahead + half:+.2f} | {verdict} |"


def summary(rows: Rows, grid: Rows) -> list[str]:
    """State the price of each batch size, and whether a goal is met."""
    lines = []
    for batch_size in larger(rows):
        found = price(points(rows, grid, batch_size), target_of(rows, grid))
        if found is None:
            continue
        text = (
            f"- **{batch_size:,}** ({IMAGES / batch_size:.1f} updates per epoch): "
            f"{_times(found.epochs)} the epochs of {SMALL}, 95 % interval {_range(found)}."
        )
        if batch_size in GOALS:
            goal = GOALS[batch_size]
            verdict = "met" if found.epochs <= goal * GRID_EPOCHS else "missed"
            sure = found.high <= goal * GRID_EPOCHS or found.low > goal * GRID_EPOCHS
            text += f" Goal, at most {goal} times: {verdict if sure else 'undecided'}."
            prices = " and ".join(
                f"{MLPERF / epochs:.2f} times the epochs of {batch:,}"
                for batch, epochs in MLPERF_SMALLER.items()
            )
            text += f" MLPerf's ResNet-50 at as many updates per epoch (65,536) takes {prices}."
        lines.append(text)
    return lines


def _times(epochs: float) -> str:
    if epochs == 0:
        return "not more than"
    return "more than twice" if math.isinf(epochs) else f"{epochs / GRID_EPOCHS:.2f} times"


def _range(found: Crossing) -> str:
    return f"{_end(found.low)} to {_end(found.high)}"


def _end(epochs: float) -> str:
    """An end of an interval; beyond the runs, it is said to be."""
    if math.isinf(epochs):
        return "above 2"
    return f"{epochs / GRID_EPOCHS:.2f}" if epochs else "below 1"


def draw(rows: Rows, grid: Rows, path: Path) -> None:
    """Plot accuracy against epochs: a dot for each run, a line through the means, the target."""
    target = target_of(rows, grid)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    half = float(t.ppf(0.975, target.freedom)) * target.error
    axes.axhspan(target.top1 - half, target.top1 + half, color="grey", alpha=0.15, linewidth=0)
    small = f"{SMALL} in {GRID_EPOCHS} epochs, 95 % interval"
    axes.axhline(target.top1, color="grey", linewidth=0.8, linestyle=":", label=small)
    for color, batch_size in zip(COLORS, larger(rows), strict=False):
        runs = points(rows, grid, batch_size)
        lengths = sorted({row["epochs"] for row in runs})
        means = [statistics.mean(r["top1"] for r in runs if r["epochs"] == e) for e in lengths]
        axes.plot(lengths, means, color=color, marker="_", markersize=12, label=f"{batch_size:,}")
        axes.plot([r["epochs"] for r in runs], [r["top1"] for r in runs], ".", color=color)
    axes.set_xlabel("epochs of the run")
    axes.set_ylabel("top-1 on the test set, %")
    axes.set_title("CIFAR-10, LARS: accuracy against the length of the run, by batch size")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write(path: Path, grid: Rows) -> str:
    """Write the tables and the plot next to the results, and return the tables.

    Args:
        path: The results, ``batch_price.json``.
        grid: Rows of ``large_batch.json``.
    """
    content = json.loads(path.read_text())
    rows: Rows = content["runs"]
    dates = " to ".join(sorted({min(r["date"] for r in rows), max(r["date"] for r in rows)}))
    machine = content["machine"]
    packages = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    origin = f"{len(rows)} runs, {dates}, {machine['processor']}, {machine['cores']} cores"
    text = "\n".join([*summary(rows, grid), "", table(rows, grid), f"{origin}, {packages}", ""])
    path.with_suffix(".md").write_text(text)
    draw(rows, grid, path.with_suffix(".png"))
    return text
