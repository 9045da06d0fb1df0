"""Render large_batch.json as tables and a plot."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.recipes.large_batch_starts import BATCHES, starts

NAMES = {"lars": "LARS", "nesterov": "SGD, Nesterov", "muon": "Muon"}
COLORS = {"lars": "tab:blue", "nesterov": "tab:orange", "muon": "tab:green"}
#: The optimizers whose best at the smallest batch the goals refer to.
BASELINES = ("lars", "nesterov")

#: The goals: how many points of accuracy LARS may lie below the best run at 256, by batch size.
GOALS = {2560: 0.5, 4096: 1.0}

Rows = list[dict[str, Any]]


def report(path: Path) -> str:
    """Write the tables and the plot next to the results, and return the tables."""
    content = json.loads(path.read_text())
    rows: Rows = content["runs"]
    versions = ", ".join(f"{package} {number}" for package, number in content["versions"].items())
    machine = f"{' and '.join(sorted({r['processor'] for r in rows}))}, {content['cores']} cores"
    dates = sorted({row["date"] for row in rows})
    period = " to ".join(dates[:: len(dates) - 1] if len(dates) > 1 else dates)
    text = "\n".join(
        [
            grid_table(rows),
            *goal_lines(rows),
            "",
            ablation_table(rows),
            f"{len(rows)} runs, {period}, {machine}, {versions}",
            "",
        ]
    )
    path.with_suffix(".md").write_text(text)
    draw(rows, path.with_suffix(".png"))
    return text


def best_of(tried: Rows) -> dict[str, Any]:
    """Return the trial with the highest accuracy."""
    return max(tried, key=lambda row: row["top1"])


def finals(rows: Rows, optimizer: str, batch_size: int) -> Rows:
    """Return the runs on the test set with a cell's tuned values, one for each seed."""
    tried = trials(rows, optimizer, batch_size)
    if not tried:
        return []
    best = best_of(tried)
    wanted = {"kind": "final", "optimizer": optimizer, "batch_size": batch_size}
    wanted |= {key: best[key] for key in ("lr", "warmup_epochs")}
    return [row for row in rows if wanted.items() <= row.items()]


def accuracies(rows: Rows, optimizer: str, batch_size: int) -> list[float]:
    """Return the top-1 accuracies of :func:`finals`, in percent."""
    return [row["top1"] for row in finals(rows, optimizer, batch_size)]


def trials(rows: Rows, optimizer: str, batch_size: int) -> Rows:
    """Return a cell's trials, in the order in which they finished."""
    cell = ("trial", optimizer, batch_size)
    return [r for r in rows if (r["kind"], r["optimizer"], r["batch_size"]) == cell]


def baseline(rows: Rows) -> tuple[str, float] | None:
    """Return the better of LARS and SGD at the smallest batch and its mean accuracy."""
    means = {
        optimizer: statistics.mean(found)
        for optimizer in BASELINES
        if (found := accuracies(rows, optimizer, BATCHES[0]))
    }
    best = max(means, key=lambda optimizer: means[optimizer], default=None)
    return None if best is None else (best, means[best])


def spread(values: list[float]) -> str:
    """Format the mean and standard deviation of some accuracies."""
    if not values:
        return "not run"
    if len(values) == 1:
        return f"{values[0]:.2f} (1 seed)"
    few = "" if len(values) == 3 else f" ({len(values)} seeds)"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}{few}"


def grid_table(rows: Rows) -> str:
    lines = [
        "| batch | optimizer | top-1 % on the test set, three seeds | to the best of LARS and SGD "
        "at 256 | to itself at 256 | learning rate | warm-up, epochs "
        "| held-out top-1 %: linear scaling | square root "
        "| tuned | trials | steps |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    best = baseline(rows)
    for batch_size in BATCHES:
        for optimizer, name in NAMES.items():
            tried = trials(rows, optimizer, batch_size)
            if not tried:
                continue
            runs, found = (f(rows, optimizer, batch_size) for f in (finals, accuracies))
            tuned = best_of(tried)
            own = accuracies(rows, optimizer, BATCHES[0])
            away = f"{statistics.mean(found) - best[1]:+.2f}" if found and best else ""
            price = f"{statistics.mean(found) - statistics.mean(own):+.2f}" if found and own else ""
            by_values = {(r["lr"], r["warmup_epochs"]): f"{r['top1']:.2f}" for r in tried}
            linear, root, _ = (by_values.get(at, "") for at in starts(optimizer, batch_size))
            steps = runs[0]["steps"] if runs else ""
            lines.append(
                f"| {batch_size:,} | {name} | {spread(found)} | {away} | {price} | {tuned['lr']:g} "
                f"| {tuned['warmup_epochs']} | {linear} "
                f"| {root if batch_size != BATCHES[0] else ''} | {tuned['top1']:.2f} "
                f"| {len(tried)} | {steps} |"
            )
    return "\n".join(lines) + "\n"


def held_out_table(rows: Rows) -> str:
    """Tabulate each cell's best trial, on held-out training images with the first seed."""
    lines = [
        "| batch | " + " | ".join(f"{name} (trials)" for name in NAMES.values()) + " | Muon minus "
        "the better of LARS and SGD | Muon minus Muon at 256 |",
        "|---:|" + "---:|" * (len(NAMES) + 2),
    ]
    found = {(o, b): trials(rows, o, b) for o in NAMES for b in BATCHES}
    best = {cell: best_of(tried)["top1"] for cell, tried in found.items() if tried}
    for batch_size in BATCHES:
        cells = [
            f"{best[o, batch_size]:.2f} ({len(found[o, batch_size])})"
            if (o, batch_size) in best
            else "not run"
            for o in NAMES
        ]
        muon, others = (
            best.get(("muon", batch_size)),
            [best.get((o, batch_size)) for o in BASELINES],
        )
        if muon is None or None in others:
            lines.append(f"| {batch_size:,} | {' | '.join(cells)} | | |")
            continue
        ahead = muon - max(value for value in others if value is not None)
        smallest = best.get(("muon", BATCHES[0]))
        price = "" if smallest is None else f"{muon - smallest:+.2f}"
        lines.append(f"| {batch_size:,} | {' | '.join(cells)} | {ahead:+.2f} | {price} |")
    return "\n".join(lines) + "\n"


def goal_lines(rows: Rows) -> list[str]:
    """State for each goal that the finished runs decide whether it is met."""
    best = baseline(rows)
    if best is None:
        return []
    lines = []
    for batch_size, points in GOALS.items():
        if found := accuracies(rows, "lars", batch_size):
            away = best[1] - statistics.mean(found)
            verdict = "met" if away <= points else "missed"
            lines.append(
                f"- Goal: LARS at {batch_size:,} within {points:.1f} points of the best at 256 "
                f"({NAMES[best[0]]}, {best[1]:.2f} %): {verdict}, {away:.2f} points below."
            )
    return lines


def ablation_table(rows: Rows) -> str:
    """Tabulate what the tuned LARS at 4,096 loses without each part, on the same seeds."""
    batch_size = 4096
    complete = {row["seed"]: row["top1"] for row in finals(rows, "lars", batch_size)}
    tried = trials(rows, "lars", batch_size)
    tuned_lr = best_of(tried)["lr"] if tried else None
    without: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["kind"] == "ablation" and row["lr"] == tuned_lr:
            without.setdefault(row["variant"], {})[row["seed"]] = row["top1"]
    if not complete or not without:
        return ""
    if sgd := finals(rows, "nesterov", batch_size):
        without["without LARS (Nesterov momentum, tuned)"] = {r["seed"]: r["top1"] for r in sgd}
    lines = [
        f"| LARS at {batch_size:,} | top-1 %, three seeds | change |",
        "|---|---:|---:|",
        f"| tuned, all of it | {spread([*complete.values()])} | |",
    ]
    for variant, found in without.items():
        changes = [top1 - complete[seed] for seed, top1 in found.items() if seed in complete]
        change = f"{statistics.mean(changes):+.2f}" if changes else ""
        lines.append(f"| {variant} | {spread([*found.values()])} | {change} |")
    return "\n".join(lines) + "\n"


def draw(rows: Rows, path: Path) -> None:
    """Plot accuracy against batch size: a dot for each seed, a line through the means."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for optimizer, name in NAMES.items():
        color = COLORS[optimizer]
        found = {b: values for b in BATCHES if (values := accuracies(rows, optimizer, b))}
        if not found:
            continue
        # Interrupt the line at a batch size that was not run.
        means = [statistics.mean(found[b]) if b in found else math.nan for b in BATCHES]
        axes.plot(BATCHES, means, color=color, marker="_", markersize=12, label=name)
        for batch_size, values in found.items():
            axes.plot([batch_size] * len(values), values, ".", color=color, alpha=0.6)
    if best := baseline(rows):
        label = "best of LARS and SGD at 256"
        axes.axhline(best[1], color="grey", linewidth=0.8, linestyle=":", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [f"{b:,}" for b in BATCHES])
    axes.set_xlabel("global batch")
    axes.set_ylabel("top-1 on the test set, %")
    cells = {(row["optimizer"], row["batch_size"]) for row in rows if row["kind"] == "final"}
    tried = min((len(trials(rows, *cell)) for cell in cells), default=0)
    axes.set_title(
        f"CIFAR-10, 20 epochs; learning rate and warm-up tuned in {tried} trials for each"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
