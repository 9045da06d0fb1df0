"""Claim: on CIFAR-10, LARS at a batch of 2,560 (19.5 updates per epoch) needs at most 1.6 times the
epochs to the accuracy that SGD reaches at 256; the best of LARS, SGD and Muon there needs no more
than the best at 256; at 4,096 at most 1.1 times, and at 8,192 at most 1.5 times.

    python -m benchmarks.recipes.epochs_to_target

It makes the tables and the plot of benchmarks/results/epochs_to_target.json. Its searches and runs
were made by the script of this name in commit fbc1dde, which goes on from the stored ones.

In each cell, an optimizer at a batch size, `largebatch tune lr` searched learning rate, warm-up,
power of the decay and momentum at one length, with the same budget of epochs, scored on training
images that were held out. The tuned values were trained on all training images at lengths on both
sides of the target; each run has a schedule of its own and was evaluated on the test set once, at
its end. The target is the mean of the first seeds of SGD at 256, with airbench's learning rate of
biases.
"""

from __future__ import annotations

import json
import math
import statistics

from benchmarks.recipes.crossing import Crossing, interval, ratio
from benchmarks.recipes.epochs_to_target_estimates import (
    HEADLINE,
    IMAGES,
    SMALL,
    TARGET_CELL,
    TARGET_SEEDS,
    Rows,
    best_at,
    cells_of,
    crossings,
    finals,
    name_of,
    never_reached,
    price_of,
    spreads_of,
    target_of,
)
from benchmarks.recipes.epochs_to_target_goals import goals_table
from benchmarks.recipes.epochs_to_target_plot import draw
from benchmarks.recipes.spread import Spreads, difference
from benchmarks.tables import RESULTS

RESULT = RESULTS / "epochs_to_target.json"

#: The optimizers of the tables of details.
ORDER = ("Nesterov", *HEADLINE)
#: Follow the first tables; the page shows the parts in different places.
OVERVIEW_ENDS = "<!-- the overview ends -->"
CHANGES_END = "<!-- the changes end -->"
GOALS_END = "<!-- the goals end -->"
#: Differences at equal epochs: of the first, minus the second.
PAIRS = (
    ("Nesterov-1x", "Nesterov"),
    ("LARS", "Nesterov-1x"),
    ("Muon", "Nesterov-1x"),
    ("Muon", "LARS"),
)


def overview(runs: Rows, target: float) -> str:
    """Tabulate the epochs to the target, a row for each optimizer and a column for each batch.

    At a larger batch, they are followed by what they are over those of the same optimizer at the
    small one. A cell whose interval is open at both ends has a "?".
    """
    found = crossings(runs, target)
    cells = [cell for cell in cells_of(runs) if cell[0] in HEADLINE]
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
            beyond, small = Crossing(math.inf, longest, math.inf), found.get((optimizer, SMALL))
            known = batch_size > SMALL and small and 0 < small.epochs < math.inf
            price = f"<br>{interval(ratio(beyond, small), unit='×')}" if small and known else ""
            return f"> {longest:g}{price}"
        epochs = found.get((optimizer, batch_size))
        if epochs is None or interval(epochs) == "?":
            return "?"
        price = price_of(found, optimizer, batch_size, optimizer)
        if price is None or batch_size == SMALL:
            return interval(epochs, 1)
        return f"{interval(epochs, 1)}<br>{interval(price, unit='×')}"

    for name in HEADLINE:
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
    """Tabulate the accuracy of each optimizer and batch size at one length.

    Args:
        runs: All runs.
        epochs: The length.
    """
    there = {(r["optimizer"], r["batch_size"]) for r in runs if r["epochs"] == epochs}
    cells = {cell: [r["top1"] for r in finals(runs, *cell, epochs)] for cell in there}
    spreads = spreads_of(runs)
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


def changes_table(runs: Rows, epochs: float) -> str:
    """Tabulate the change in accuracy from the small batch to each larger one at one length.

    Args:
        runs: All runs, some of them with equal settings.
        epochs: The length.
    """
    spreads = spreads_of(runs)
    there = {(r["optimizer"], r["batch_size"]) for r in runs if r["epochs"] == epochs}
    larger = sorted({batch_size for _, batch_size in there if batch_size > SMALL})
    columns = " | ".join(f"{batch_size:,} ({IMAGES / batch_size:.3g})" for batch_size in larger)
    lines = [
        f"| top-1 after {epochs:g} epochs, minus that at {SMALL}, at a batch of (updates per "
        f"epoch) | {columns} |",
        f"|---|{'---:|' * len(larger)}",
    ]

    def top1(cell: tuple[str, int]) -> list[float]:
        return [r["top1"] for r in finals(runs, *cell, epochs)]

    for name in HEADLINE:
        small = name, SMALL
        cells = [(name, batch_size) for batch_size in larger]
        if small not in there or not there.intersection(cells):
            continue
        shown = [
            difference(top1(cell), spreads[cell], top1(small), spreads[small])
            if cell in there
            else ""
            for cell in cells
        ]
        lines.append(f"| {name_of(name)} | {' | '.join(shown)} |")
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


def main() -> None:
    """Write the tables and the plot next to the results, and print the tables."""
    content = json.loads(RESULT.read_text())
    searches, runs, epochs = content["searches"], content["runs"], content["epochs"]
    target = target_of(runs, epochs)
    small = f"{name_of(TARGET_CELL[0])} at {TARGET_CELL[1]} in {epochs} epochs"
    rows = [*searches, *runs]
    days = sorted({row["date"] for row in rows})
    machines = " and ".join(sorted({row["processor"] for row in rows}))
    packages = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    text = "\n".join(
        [
            f"Target: {target:.1f} %, the mean of {TARGET_SEEDS} seeds of {small}.",
            "",
            overview(runs, target),
            OVERVIEW_ENDS,
            "",
            changes_table(runs, epochs),
            CHANGES_END,
            "",
            goals_table(runs, target),
            GOALS_END,
            "",
            spread_line(spreads_of(runs), cells_of(runs)),
            "",
            table(runs, target),
            equal_epochs_table(runs, epochs),
            run_table(runs),
            search_table(searches),
            f"{len(searches)} searches and {len(runs)} runs, {days[0]} to {days[-1]}, {machines}, "
            f"{content['cores']} cores, {packages}\n",
        ]
    )
    RESULT.with_suffix(".md").write_text(text)
    draw(runs, target, RESULT.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
