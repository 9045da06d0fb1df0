"""Render epochs_to_target.json as tables and a plot."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from scipy.stats import t

from benchmarks.recipes.crossing import Crossing, Target, crossing, ratio
from benchmarks.recipes.large_batch_single import Rows

IMAGES = 50_000

#: The cell, and the number of its seeds, whose mean is the target.
TARGET_CELL, TARGET_SEEDS = ("Nesterov", 256), 3
SMALL = 256

#: The goals, by batch size: epochs over those of the small batch, for LARS and for the best.
GOALS_OF_LARS = {2560: 1.6}
GOALS_OF_BEST = {2560: 1.0, 4096: 1.1, 8192: 1.5}

COLORS = {"Nesterov": "tab:orange", "LARS": "tab:blue", "Muon": "tab:green", "LAMB": "tab:red"}


def search_of(searches: Rows, optimizer: str, batch_size: int) -> dict[str, Any] | None:
    """Return the search of a cell, or None if it has not finished."""
    for row in searches:
        if (row["optimizer"], row["batch_size"]) == (optimizer, batch_size):
            return row
    return None


def finals(runs: Rows, optimizer: str, batch_size: int, epochs: float | None = None) -> Rows:
    """Return the runs of a cell, of one length or of all, in the order of their seeds."""
    found = [r for r in runs if (r["optimizer"], r["batch_size"]) == (optimizer, batch_size)]
    return sorted(
        (r for r in found if epochs is None or r["epochs"] == epochs), key=lambda r: r["seed"]
    )


def target_of(runs: Rows, epochs: float) -> float | None:
    """Return the accuracy to reach, to a tenth of a point, or None until its runs have finished.

    Args:
        runs: All runs.
        epochs: Length of the runs that it is the mean of.
    """
    found = finals(runs, *TARGET_CELL, epochs)[:TARGET_SEEDS]
    if [row["seed"] for row in found] != list(range(TARGET_SEEDS)):
        return None
    return round(statistics.mean(row["top1"] for row in found), 1)


def epochs_of(runs: Rows, optimizer: str, batch_size: int, target: float) -> Crossing | None:
    """Return the epochs of a cell to the target, or None if its runs are too few."""
    found = finals(runs, optimizer, batch_size)
    try:
        return crossing([r["epochs"] for r in found], [r["top1"] for r in found], Target(target))
    except ValueError:
        return None


def crossings(runs: Rows, target: float) -> dict[tuple[str, int], Crossing]:
    """Return the epochs to the target of all cells that have enough runs."""
    cells = sorted({(r["optimizer"], r["batch_size"]) for r in runs}, key=lambda c: (c[1], c[0]))
    found = {cell: epochs_of(runs, *cell, target) for cell in cells}
    return {cell: value for cell, value in found.items() if value is not None}


def best_at(found: dict[tuple[str, int], Crossing], batch_size: int) -> str | None:
    """Return the optimizer that needs the fewest epochs at a batch size, None if none got there."""
    known = {o: c.epochs for (o, b), c in found.items() if b == batch_size}
    best = min(known, key=lambda name: known[name], default=None)
    return best if best and math.isfinite(known[best]) else None


def number(value: float, places: int = 2) -> str:
    """A number of epochs or a ratio; one beyond the lengths that were trained is said to be."""
    if value == 0:
        return "less than trained"
    return f"{value:.{places}f}" if math.isfinite(value) else "more than trained"


def interval(value: Crossing, places: int = 2) -> str:
    """An estimate and its interval."""
    if not 0 < value.epochs < math.inf or value.low == value.high:
        return number(value.epochs, places)
    low = number(value.low, places) if value.low else "?"
    high = number(value.high, places) if math.isfinite(value.high) else "?"
    return f"{value.epochs:.{places}f} ({low} to {high})"


def price_of(
    found: dict[tuple[str, int], Crossing], optimizer: str, batch_size: int, small: str | None
) -> Crossing | None:
    """Return the epochs of a cell over those of an optimizer at the small batch.

    None if a cell is missing, or the small batch did not reach the target within the lengths that
    were trained.
    """
    if (optimizer, batch_size) == (small, SMALL):
        return Crossing(1.0, 1.0, 1.0)  # whatever its own interval is
    cell, base = found.get((optimizer, batch_size)), found.get((small or "", SMALL))
    if cell is None or base is None or not 0 < base.epochs < math.inf:
        return None
    return ratio(cell, base)


def table(runs: Rows, target: float) -> str:
    """Tabulate the epochs to the target, and the price against each of the two small batches."""
    found = crossings(runs, target)
    best = best_at(found, SMALL)
    lines = [
        f"| batch | updates per epoch | optimizer | epochs to {target:.1f} %, 95 % interval "
        f"| over the same optimizer at {SMALL} | over the best at {SMALL} | runs |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    for (optimizer, batch_size), epochs in found.items():
        prices = [
            interval(price) if (price := price_of(found, optimizer, batch_size, other)) else ""
            for other in (optimizer, best)
        ]
        lines.append(
            f"| {batch_size:,} | {IMAGES / batch_size:.1f} | {optimizer} | {interval(epochs, 1)} "
            f"| {prices[0]} | {prices[1]} | {len(finals(runs, optimizer, batch_size))} |"
        )
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Pooled:
    """The spread between seeds, taken to be the same in several cells.

    Attributes:
        deviation: Standard deviation of one run.
        freedom: Its degrees of freedom.
    """

    deviation: float
    freedom: int

    @classmethod
    def of(cls, cells: Iterable[list[float]]) -> Pooled:
        """Pool the spread within cells, of which at least one has two runs."""
        several = [cell for cell in cells if len(cell) > 1]
        freedom = sum(len(cell) - 1 for cell in several)
        squares = sum(statistics.variance(cell) * (len(cell) - 1) for cell in several)
        return cls(math.sqrt(squares / freedom), freedom)

    def half(self, *numbers: int) -> float:
        """Return half of the 95 % interval of a mean of that many runs, or of two means' distance.

        Args:
            *numbers: Runs of the mean, or of each of the two.
        """
        error = self.deviation * math.sqrt(sum(1 / number for number in numbers))
        return float(t.ppf(0.975, self.freedom)) * error


def equal_epochs_table(runs: Rows, epochs: float) -> str:
    """Tabulate the accuracy of each optimizer and batch size at one length; empty without spread.

    Args:
        runs: All runs.
        epochs: The length.
    """
    there = {(r["optimizer"], r["batch_size"]) for r in runs if r["epochs"] == epochs}
    cells = {cell: [r["top1"] for r in finals(runs, *cell, epochs)] for cell in there}
    if not any(len(cell) > 1 for cell in cells.values()):
        return ""
    pooled = Pooled.of(cells.values())
    names = [name for name in COLORS if any(name == optimizer for optimizer, _ in there)]

    def mean(cell: list[float]) -> str:
        return f"{statistics.mean(cell):.2f} ± {pooled.half(len(cell)):.2f}" if cell else ""

    def minus(one: list[float], other: list[float]) -> str:
        if not (one and other):
            return ""
        distance = statistics.mean(one) - statistics.mean(other)
        half = pooled.half(len(one), len(other))
        unresolved = ", unresolved" if abs(distance) <= half else ""
        return f"{distance:+.2f} ± {half:.2f}{unresolved}"

    lines = [
        f"Top-1 % on the test set after {epochs:g} epochs, with 95 % intervals from the spread of "
        f"all runs of this length: {pooled.deviation:.2f} points (standard deviation, "
        f"{pooled.freedom} degrees of freedom).",
        "",
        f"| batch | updates | {' | '.join(names)} | LARS minus Nesterov | Muon minus LARS "
        "| seeds of each |",
        f"|---:|---:|{'---:|' * (len(names) + 3)}",
    ]
    for batch_size in sorted({batch_size for _, batch_size in there}):
        here = {name: cells.get((name, batch_size), []) for name in names}
        of = {name: here.get(name, []) for name in ("Nesterov", "LARS", "Muon")}
        shown = [mean(here[name]) for name in names]
        shown += [minus(of["LARS"], of["Nesterov"]), minus(of["Muon"], of["LARS"])]
        counts = sorted({len(cell) for cell in here.values() if cell})
        seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        updates = next(
            r["steps"] for r in runs if (r["batch_size"], r["epochs"]) == (batch_size, epochs)
        )
        lines.append(f"| {batch_size:,} | {updates:,} | {' | '.join(shown)} | {seeds} |")
    return "\n".join(lines) + "\n"


def run_table(runs: Rows) -> str:
    """Tabulate the accuracy of each length of each cell."""
    lines = [
        "| batch | optimizer | epochs | top-1 % on the test set | seeds |",
        "|---:|---|---:|---:|---:|",
    ]
    keys = sorted({(r["batch_size"], r["optimizer"], r["epochs"]) for r in runs})
    for batch_size, optimizer, epochs in keys:
        top1 = [r["top1"] for r in finals(runs, optimizer, batch_size, epochs)]
        spread = f" ± {statistics.stdev(top1):.2f}" if len(top1) > 1 else ""
        mean = statistics.mean(top1)
        lines.append(
            f"| {batch_size:,} | {optimizer} | {epochs:g} | {mean:.2f}{spread} | {len(top1)} |"
        )
    return "\n".join(lines) + "\n"


def search_table(searches: Rows) -> str:
    """Tabulate what the searches found."""
    lines = [
        "| batch | optimizer | learning rate | warm-up, part of the run | power | momentum "
        "| top-1 % on held-out images | trials | epochs of all |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(searches, key=lambda row: (row["batch_size"], row["optimizer"])):
        best = row["best"]
        momentum = f"{best['momentum']:.3g}" if "momentum" in best else ""
        lines.append(
            f"| {row['batch_size']:,} | {row['optimizer']} | {best['lr']:.3g} "
            f"| {best['warmup']:.2f} | {best['power']:.2f} | {momentum} | {best['top1']:.2f} "
            f"| {len(row['trials'])} | {row['epochs']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def goals(runs: Rows, target: float) -> list[str]:
    """State for each goal whether it is met, missed or not decided."""
    found = crossings(runs, target)
    best_small = best_at(found, SMALL)
    lines = []
    for batch_size, limit in GOALS_OF_LARS.items():
        if price := price_of(found, "LARS", batch_size, "LARS"):
            text = f"LARS at {batch_size:,} takes at most {limit} times its epochs at {SMALL}"
            lines.append(f"- Goal: {text}: {verdict(price, limit)}")
    for batch_size, limit in GOALS_OF_BEST.items():
        best = best_at(found, batch_size)
        price = price_of(found, best or "", batch_size, best_small)
        if price and ("Muon", batch_size) in found:
            text = f"the best at {batch_size:,} ({best}) takes at most {limit} times the epochs of"
            lines.append(f"- Goal: {text} the best at {SMALL} ({best_small}): ")
            lines[-1] += verdict(price, limit)
    return lines


def verdict(price: Crossing, limit: float) -> str:
    """Say whether a price is within a limit, and whether the interval decides it."""
    met = "met" if price.epochs <= limit else "missed"
    decided = price.high <= limit or price.low > limit
    unresolved = "" if decided else "; the interval holds the goal: unresolved"
    return f"{met}, {interval(price)}{unresolved}."


def draw(runs: Rows, target: float, path: Path) -> None:
    """Plot the epochs to the target against the batch size, a line for each optimizer.

    An arrow ends an interval at the shortest or longest run of its cell: it reaches further. A cell
    whose interval is open at both ends is drawn hollow, and no line goes through it.
    """
    found = crossings(runs, target)
    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    for index, (name, color) in enumerate(COLORS.items()):
        here = {b: c for (o, b), c in found.items() if o == name and 0 < c.epochs < math.inf}
        if not here:
            continue
        batches = sorted(here)
        places = [b * 1.02 ** (index - 1) for b in batches]  # so that intervals do not overlap
        known = [b for b in batches if here[b].low > 0 or here[b].high < math.inf]
        line = [(p, here[b].epochs) for p, b in zip(places, batches, strict=True) if b in known]
        axes.plot(*zip(*line, strict=True), color=color, marker="o", label=name)
        for place, batch in zip(places, batches, strict=True):
            if batch not in known:
                hollow = {"marker": "o", "markerfacecolor": "white", "zorder": 3}
                axes.plot([place], [here[batch].epochs], color=color, **hollow)
            trained = [row["epochs"] for row in finals(runs, name, batch)]
            ends = max(here[batch].low, min(trained)), min(here[batch].high, max(trained))
            axes.plot([place] * 2, ends, color=color)
            open_ends = here[batch].low < min(trained), here[batch].high > max(trained)
            for end, is_open, arrow in zip(ends, open_ends, "v^", strict=True):
                axes.plot([place], [end], color=color, marker=arrow if is_open else "_")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    batches = sorted({b for _, b in found})
    axes.set_xticks(batches, [f"{b:,}" for b in batches])
    low, high = axes.get_ylim()
    lengths = [5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40]
    axes.set_yticks([n for n in lengths if low <= n <= high], minor=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel("batch size, images")
    axes.set_ylabel(f"epochs to {target:.1f} % on the test set")
    axes.set_title("CIFAR-10: epochs to the same accuracy, with 95 % intervals (arrow: open end)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write(path: Path) -> str:
    """Write the tables and the plot next to the results, and return the tables."""
    content = json.loads(path.read_text())
    searches, runs = content["searches"], content["runs"]
    parts = []
    target = target_of(runs, content["epochs"])
    if target is not None:
        small = f"{TARGET_CELL[0]} at {TARGET_CELL[1]} in {content['epochs']} epochs"
        parts += [f"Target: {target:.1f} %, the mean of {TARGET_SEEDS} seeds of {small}.", ""]
        parts += [*goals(runs, target), "", table(runs, target)]
        if equal := equal_epochs_table(runs, content["epochs"]):
            parts.append(equal)
        if len({batch_size for _, batch_size in crossings(runs, target)}) > 1:
            draw(runs, target, path.with_suffix(".png"))
    parts += [run_table(runs), search_table(searches)] if runs else [search_table(searches)]
    rows = [*searches, *runs]
    days = sorted({row["date"] for row in rows})
    machines = " and ".join(sorted({row["processor"] for row in rows}))
    packages = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    span = " to ".join(dict.fromkeys((days[0], days[-1])))
    parts.append(
        f"{len(searches)} searches and {len(runs)} runs, {span}, {machines}, "
        f"{content['cores']} cores, {packages}\n"
    )
    text = "\n".join(parts)
    path.with_suffix(".md").write_text(text)
    return text
