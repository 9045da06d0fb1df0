"""The tables and the plot of large_batch.json."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

BATCHES = (256, 1024, 2560, 4096, 8192)
TEST_IMAGES = 10_000
NAMES = {"lars": "LARS", "nesterov": "SGD, Nesterov"}

#: How far below the best run at 256 LARS may be, in points: the goals.
GOALS = {2560: 0.5, 4096: 1.0}

Rows = list[dict[str, Any]]


def report(path: Path) -> str:
    """Write the tables and the plot beside the results, and give the tables."""
    content = json.loads(path.read_text())
    rows: Rows = content["runs"]
    versions = ", ".join(f"{package} {number}" for package, number in content["versions"].items())
    machine = f"{content['machine']['processor']}, {content['machine']['cores']} cores"
    dates = sorted(row["date"] for row in rows)
    text = "\n".join(
        [
            grid_table(rows),
            *goal_lines(rows),
            "",
            ablation_table(rows),
            f"{len(rows)} runs, {dates[0]} to {dates[-1]}, {machine}, {versions}",
            "",
        ]
    )
    path.with_suffix(".md").write_text(text)
    draw(rows, path.with_suffix(".png"))
    return text


def finals(rows: Rows, optimizer: str, batch_size: int) -> list[float]:
    """Test accuracies of a cell's tuned values, by seed."""
    cell = ("final", optimizer, batch_size)
    return [r["top1"] for r in rows if (r["kind"], r["optimizer"], r["batch_size"]) == cell]


def trials(rows: Rows, optimizer: str, batch_size: int) -> Rows:
    """A cell's trials, in the order in which they ended."""
    cell = ("trial", optimizer, batch_size)
    return [r for r in rows if (r["kind"], r["optimizer"], r["batch_size"]) == cell]


def baseline(rows: Rows) -> tuple[str, float] | None:
    """The optimizer that is better at the smallest batch, and its mean."""
    means = {
        optimizer: statistics.mean(found)
        for optimizer in NAMES
        if (found := finals(rows, optimizer, BATCHES[0]))
    }
    best = max(means, key=lambda optimizer: means[optimizer], default=None)
    return None if best is None else (best, means[best])


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    if not values:
        return "not run"
    if len(values) == 1:
        return f"{values[0]:.2f} (1 seed)"
    few = "" if len(values) == 3 else f" ({len(values)} seeds)"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}{few}"


def grid_table(rows: Rows) -> str:
    lines = [
        "| batch | optimizer | top-1 % on the test set, three seeds | to the best at 256 "
        "| learning rate | warm-up, epochs | held-out top-1 %: linear scaling | square root "
        "| tuned | trials | steps |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    best = baseline(rows)
    for batch_size in BATCHES:
        for optimizer, name in NAMES.items():
            tried = trials(rows, optimizer, batch_size)
            if not tried:
                continue
            found = finals(rows, optimizer, batch_size)
            tuned = max(tried, key=lambda row: row["top1"])
            away = f"{statistics.mean(found) - best[1]:+.2f}" if found and best else ""
            linear = f"{tried[0]['top1']:.2f}"
            root = f"{tried[1]['top1']:.2f}" if len(tried) > 1 else ""
            steps = next(
                (
                    r["steps"]
                    for r in rows
                    if r["kind"] == "final"
                    and (r["optimizer"], r["batch_size"]) == (optimizer, batch_size)
                ),
                "",
            )
            lines.append(
                f"| {batch_size:,} | {name} | {spread(found)} | {away} | {tuned['lr']:g} "
                f"| {tuned['warmup_epochs']} | {linear} "
                f"| {root if batch_size != BATCHES[0] else ''} | {tuned['top1']:.2f} "
                f"| {len(tried)} | {steps} |"
            )
    return "\n".join(lines) + "\n"


def goal_lines(rows: Rows) -> list[str]:
    """Whether the goals are met, as far as the runs tell."""
    best = baseline(rows)
    if best is None:
        return []
    lines = []
    for batch_size, points in GOALS.items():
        if found := finals(rows, "lars", batch_size):
            away = best[1] - statistics.mean(found)
            verdict = "met" if away <= points else "missed"
            lines.append(
                f"- Goal: LARS at {batch_size:,} within {points:g} points of the best at 256 "
                f"({NAMES[best[0]]}, {best[1]:.2f} %): {verdict}, {away:.2f} points below."
            )
    return lines


def ablation_table(rows: Rows) -> str:
    ablated: dict[str, list[float]] = {}
    for row in rows:
        if row["kind"] == "ablation":
            ablated.setdefault(row["variant"], []).append(row["top1"])
    batch_size = 4096
    whole = finals(rows, "lars", batch_size)
    if not whole or not ablated:
        return ""
    without = {f"{variant}": found for variant, found in ablated.items()}
    if sgd := finals(rows, "nesterov", batch_size):
        without["without LARS (Nesterov momentum, tuned)"] = sgd
    lines = [
        f"| LARS at {batch_size:,} | top-1 %, three seeds | change |",
        "|---|---:|---:|",
        f"| tuned, all of it | {spread(whole)} | |",
    ]
    for variant, found in without.items():
        change = statistics.mean(found) - statistics.mean(whole)
        lines.append(f"| {variant} | {spread(found)} | {change:+.2f} |")
    return "\n".join(lines) + "\n"


def draw(rows: Rows, path: Path) -> None:
    """Accuracy against batch size: a dot for each seed, a line through the means."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (optimizer, name), color in zip(NAMES.items(), ("tab:blue", "tab:orange"), strict=True):
        found = {b: values for b in BATCHES if (values := finals(rows, optimizer, b))}
        if not found:
            continue
        means = [statistics.mean(values) for values in found.values()]
        axes.plot(list(found), means, color=color, marker="_", markersize=12, label=name)
        for batch_size, values in found.items():
            axes.plot([batch_size] * len(values), values, ".", color=color, alpha=0.6)
    if best := baseline(rows):
        axes.axhline(best[1], color="grey", linewidth=0.8, linestyle=":")
        axes.text(BATCHES[-1], best[1], "best at 256", ha="right", va="bottom", color="grey")
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [f"{b:,}" for b in BATCHES])
    axes.set_xlabel("global batch")
    axes.set_ylabel("top-1 on the test set, %")
    axes.set_title("CIFAR-10, 20 epochs, learning rate and warm-up tuned for each")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
