"""Render epochs_to_target.json as tables and a plot."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.recipes.crossing import Crossing
from benchmarks.recipes.epochs_to_target_estimates import (
    SMALL,
    TARGET_CELL,
    TARGET_SEEDS,
    best_at,
    cells_of,
    crossings,
    finals,
    never_reached,
    price_of,
    spreads_of,
    target_of,
)
from benchmarks.recipes.large_batch_single import Rows
from benchmarks.recipes.spread import Spreads, difference

IMAGES = 50_000

#: Points of accuracy that a better setting may add to a cell: see :func:`goals`.
GAIN = 0.2

#: The goals, by batch size: epochs over those of the small batch, for LARS and for the best.
GOALS_OF_LARS = {2560: 1.6}
GOALS_OF_BEST = {2560: 1.0, 4096: 1.1, 8192: 1.5}

#: The optimizers of the overview and the plot, in this order. SGD is there with the learning rate
#: of biases that serves it better here.
COLORS = {
    "Nesterov-1x": "tab:orange",
    "LARS": "tab:blue",
    "Muon": "tab:green",
    "LAMB": "tab:red",
}
#: The optimizers of the tables of details.
ORDER = ("Nesterov", *COLORS)
#: Follow the overview and the goals in the tables; the page shows the parts in different places.
OVERVIEW_ENDS = "<!-- the overview ends -->"
GOALS_END = "<!-- the goals end -->"
#: What is shown for a key of ``OPTIMIZERS`` that does not say which optimizer it is. The number is
#: the learning rate of biases over that of the other weights.
NAMES = {"Nesterov": "SGD (biases 64×)", "Nesterov-1x": "SGD"}
#: Differences at equal epochs: of the first, minus the second.
PAIRS = (("Nesterov-1x", "Nesterov"), ("LARS", "Nesterov-1x"), ("Muon", "LARS"))


def name_of(optimizer: str) -> str:
    """Return what is shown for a key of ``OPTIMIZERS``."""
    return NAMES.get(optimizer, optimizer)


def interval(value: Crossing, places: int = 2, unit: str = "") -> str:
    """An estimate and its interval; an end beyond the lengths that were trained is left open.

    Args:
        value: What is shown.
        places: Digits behind the point.
        unit: Follows the estimate, or the end that is known where there is none.
    """

    def shown(number: float) -> str:
        return f"{number:.{places}f}"

    low, high = value.low > 0, value.high < math.inf
    if not (low or high):
        return "?"
    if not 0 < value.epochs < math.inf:
        return (f"> {shown(value.low)}" if low else f"< {shown(value.high)}") + unit
    if value.low == value.high:
        return shown(value.epochs) + unit
    if low and high:
        ends = f"{shown(value.low)} to {shown(value.high)}"
    else:
        ends = f"at least {shown(value.low)}" if low else f"at most {shown(value.high)}"
    return f"{shown(value.epochs)}{unit} ({ends})"


def overview(runs: Rows, target: float) -> str:
    """Tabulate the epochs to the target, a row for each optimizer and a column for each batch.

    At a larger batch, they are followed by what they are over those of the same optimizer at the
    small one. A cell whose interval is open at both ends has a "?".
    """
    found = crossings(runs, target)
    cells = [cell for cell in cells_of(runs) if cell[0] in COLORS]
    batches = sorted({batch_size for _, batch_size in cells})
    columns = " | ".join(f"{b:,} ({IMAGES / b:.3g})" for b in batches)
    lines = [
        f"| epochs to {target:.1f} % at a batch of (updates per epoch) | {columns} |",
        f"|---|{'---:|' * len(batches)}",
    ]

    def cell(optimizer: str, batch_size: int) -> str:
        if (optimizer, batch_size) not in cells:
            return ""
        if never_reached(runs, optimizer, batch_size, target):
            longest = max(row["epochs"] for row in finals(runs, optimizer, batch_size))
            return f"> {longest:g}"
        epochs = found.get((optimizer, batch_size))
        if epochs is None or interval(epochs) == "?":
            return "?"
        price = price_of(found, optimizer, batch_size, optimizer)
        if price is None or batch_size == SMALL:
            return interval(epochs, 1)
        return f"{interval(epochs, 1)}<br>{interval(price, unit='×')}"

    for name in COLORS:
        if any(name == optimizer for optimizer, _ in cells):
            row = " | ".join(cell(name, batch_size) for batch_size in batches)
            lines.append(f"| {name_of(name)} | {row} |")
    return "\n".join(lines) + "\n"


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
            f"| {batch_size:,} | {IMAGES / batch_size:.1f} | {name_of(optimizer)} "
            f"| {interval(epochs, 1)} "
            f"| {prices[0]} | {prices[1]} | {len(finals(runs, optimizer, batch_size))} |"
        )
    return "\n".join(lines) + "\n"


def equal_epochs_table(runs: Rows, epochs: float) -> str:
    """Tabulate the accuracy of each optimizer and batch size at one length; empty without spread.

    Args:
        runs: All runs.
        epochs: The length.
    """
    there = {(r["optimizer"], r["batch_size"]) for r in runs if r["epochs"] == epochs}
    cells = {cell: [r["top1"] for r in finals(runs, *cell, epochs)] for cell in there}
    spreads = spreads_of(runs)
    if spreads is None:
        return ""
    names = [name for name in ORDER if any(name == optimizer for optimizer, _ in there)]

    def mean(cell: tuple[str, int]) -> str:
        if cell not in cells:
            return ""
        found = cells[cell]
        return f"{statistics.mean(found):.2f} ± {spreads[cell].half(len(found)):.2f}"

    def minus(one: tuple[str, int], other: tuple[str, int]) -> str:
        if not (one in cells and other in cells):
            return ""
        return difference(cells[one], spreads[one], cells[other], spreads[other])

    pairs = [pair for pair in PAIRS if {*pair} <= {*names}]
    differences = [f"{name_of(one)} minus {name_of(other)}" for one, other in pairs]
    lines = [
        f"Top-1 % on the test set after {epochs:g} epochs, with 95 % intervals.",
        "",
        f"| batch | updates | {' | '.join([*map(name_of, names), *differences])} | seeds of each |",
        f"|---:|---:|{'---:|' * (len(names) + len(differences) + 1)}",
    ]
    for batch_size in sorted({batch_size for _, batch_size in there}):
        shown = [mean((name, batch_size)) for name in names]
        shown += [minus((one, batch_size), (other, batch_size)) for one, other in pairs]
        counts = sorted(len(found) for (_, batch), found in cells.items() if batch == batch_size)
        seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        updates = next(
            r["steps"] for r in runs if (r["batch_size"], r["epochs"]) == (batch_size, epochs)
        )
        lines.append(f"| {batch_size:,} | {updates:,} | {' | '.join(shown)} | {seeds} |")
    return "\n".join(lines) + "\n"


def run_table(runs: Rows) -> str:
    """Tabulate the accuracy of each length of each cell."""
    lines = [
        "Accuracy of each length; values after ± are standard deviations.",
        "",
        "| batch | optimizer | epochs | top-1 % on the test set | seeds |",
        "|---:|---|---:|---:|---:|",
    ]
    keys = sorted({(r["batch_size"], r["optimizer"], r["epochs"]) for r in runs})
    for batch_size, optimizer, epochs in keys:
        top1 = [r["top1"] for r in finals(runs, optimizer, batch_size, epochs)]
        spread = f" ± {statistics.stdev(top1):.2f}" if len(top1) > 1 else ""
        mean = statistics.mean(top1)
        lines.append(
            f"| {batch_size:,} | {name_of(optimizer)} | {epochs:g} | {mean:.2f}{spread} "
            f"| {len(top1)} |"
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
            f"| {row['batch_size']:,} | {name_of(row['optimizer'])} | {best['lr']:.3g} "
            f"| {best['warmup']:.2f} | {best['power']:.2f} | {momentum} | {best['top1']:.2f} "
            f"| {len(row['trials'])} | {row['epochs']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def goals_table(runs: Rows, target: float) -> str:
    """Tabulate for each goal whether it is met, missed or undecided.

    How good a setting the search of a cell found is in no interval. What the price would be if
    another one added :data:`GAIN` points at the larger batch alone is stated beside it.
    """
    found, better = crossings(runs, target), crossings(runs, target, GAIN)
    best_small = best_at(found, SMALL)
    lines = [
        f"| goal: epochs over those at {SMALL} | measured | with {GAIN} points more at the larger "
        "batch |",
        "|---|---|---|",
    ]

    def add(text: str, optimizer: str, batch_size: int, small: str | None, limit: float) -> None:
        price = price_of(found, optimizer, batch_size, small)
        if price is None:
            return
        kept = {cell: value for cell, value in found.items() if cell[1] == SMALL}
        gained = price_of(better | kept, optimizer, batch_size, small)
        assert gained
        lines.append(
            f"| {text} | **{verdict(price, limit)}**: {interval(price)} "
            f"| {verdict(gained, limit)}: {interval(gained)} |"
        )

    for batch_size, limit in GOALS_OF_LARS.items():
        add(f"LARS at {batch_size:,}: at most {limit} times", "LARS", batch_size, "LARS", limit)
    for batch_size, limit in GOALS_OF_BEST.items():
        best = best_at(found, batch_size)
        if best and ("Muon", batch_size) in found:
            text = f"the best at {batch_size:,} ({name_of(best)}), over the best at {SMALL} "
            text += f"({name_of(best_small or 'none')}): at most {limit} times"
            add(text, best, batch_size, best_small, limit)
    return "\n".join(lines) + "\n"


def verdict(price: Crossing, limit: float) -> str:
    """Say whether a price is within a limit, undecided if its interval holds the limit."""
    if price.low <= limit < price.high:
        return "undecided"
    return "met" if price.high <= limit else "missed"


def spread_line(spreads: Spreads, cells: list[tuple[str, int]]) -> str:
    """State the spread that the intervals are made from."""
    usual, larger = spreads.usual, spreads.larger
    text = (
        f"Intervals are at 95 % (Student's t), from the spread of single runs of one length: "
        f"{usual.deviation:.2f} points (standard deviation, {usual.freedom:g} degrees of "
        "freedom), pooled over all cells"
    )
    if larger is None:
        return f"{text}."
    names = sorted(f"{name_of(cell[0])} at {cell[1]:,}" for cell in cells if cell in spreads.apart)
    return (
        f"{text} but {' and '.join(names)}, whose seeds spread more: {larger.deviation:.2f} points "
        f"({larger.freedom:g})."
    )


def draw(runs: Rows, target: float, path: Path) -> None:
    """Plot the epochs to the target against the batch size, a line for each optimizer.

    An arrow ends an interval at the shortest or longest run of its cell: it reaches further. Where
    both ends are open, no estimate is drawn. A cell that has not reached the target is a hollow
    triangle at its longest run.
    """
    found = {cell: value for cell, value in crossings(runs, target).items() if cell[0] in COLORS}
    never = {c for c in cells_of(runs) if c[0] in COLORS and never_reached(runs, *c, target)}
    never |= {cell for cell, value in found.items() if value.epochs == math.inf}
    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    for index, (name, color) in enumerate(COLORS.items()):
        here = {
            b: c
            for (o, b), c in found.items()
            if o == name and 0 < c.epochs < math.inf and (o, b) not in never
        }
        if any(name == optimizer for optimizer, _ in cells_of(runs)):
            axes.plot([], [], color=color, marker="o", label=name_of(name))
        for batch in (b for o, b in never if o == name):
            longest = max(row["epochs"] for row in finals(runs, name, batch))
            hollow = {"marker": "^", "markersize": 8, "markerfacecolor": "white"}
            axes.plot([batch * 1.04 ** (index - 1)], [longest], color=color, **hollow)
        if not here:
            continue
        batches = sorted(here)
        places = [b * 1.04 ** (index - 1) for b in batches]  # so that intervals do not overlap
        known = [b for b in batches if here[b].low > 0 or here[b].high < math.inf]
        line = [(p, here[b].epochs) for p, b in zip(places, batches, strict=True) if b in known]
        if line:
            axes.plot(*zip(*line, strict=True), color=color, marker="o")
        for place, batch in zip(places, batches, strict=True):
            trained = [row["epochs"] for row in finals(runs, name, batch)]
            ends = max(here[batch].low, min(trained)), min(here[batch].high, max(trained))
            axes.plot([place] * 2, ends, color=color)
            open_ends = here[batch].low < min(trained), here[batch].high > max(trained)
            for end, is_open, arrow in zip(ends, open_ends, "v^", strict=True):
                axes.plot([place], [end], color=color, marker=arrow if is_open else "_")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    batches = sorted({b for _, b in found} | {b for _, b in never})
    axes.set_xticks(batches, [f"{b:,}\n({IMAGES / b:.3g})" for b in batches])
    low, high = axes.get_ylim()
    lengths = [5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40]
    axes.set_yticks([n for n in lengths if low <= n <= high], minor=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel("batch size, images (updates per epoch)")
    axes.set_ylabel(f"epochs to {target:.1f} % on the test set")
    axes.set_title(
        "CIFAR-10: epochs to the same accuracy, with 95 % intervals\n"
        "(arrow: open end; hollow triangle: not reached in that many epochs)",
        fontsize=10,
    )
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
        small = f"{name_of(TARGET_CELL[0])} at {TARGET_CELL[1]} in {content['epochs']} epochs"
        parts += [f"Target: {target:.1f} %, the mean of {TARGET_SEEDS} seeds of {small}.", ""]
        parts += [
            overview(runs, target),
            OVERVIEW_ENDS,
            "",
            goals_table(runs, target),
            GOALS_END,
            "",
        ]
        if spreads := spreads_of(runs):
            parts += [spread_line(spreads, cells_of(runs)), ""]
        parts.append(table(runs, target))
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
