"""How far the prices of epochs_to_target.py depend on the target and on how they are read."""

from __future__ import annotations

import math
import statistics

import numpy as np

from benchmarks.airbench_optimizers import name_of
from benchmarks.recipes.crossing import Bend, Target, crossing, interval
from benchmarks.recipes.epochs_to_target_estimates import (
    HEADLINE,
    SMALL,
    Crossings,
    by_length,
    cells_of,
    crossings,
    finals,
    price_of,
    spreads_of,
)
from benchmarks.recipes.large_batch_single import Rows
from benchmarks.recipes.spread import Spreads, half_of

#: Follow the first tables; the page shows them in different places.
LUCK_ENDS = "<!-- the luck ends -->"
TARGETS_END = "<!-- the targets end -->"
READINGS_END = "<!-- the readings end -->"
#: Points of accuracy from the target to others that are looked at.
OTHER_TARGETS = (-0.5, -0.25, 0.0, 0.25)
#: Points that a better setting is assumed to add, in the table of what the luck of a search is.
LUCK = 0.25
#: Differences at the same length: of the first, minus the second.
PAIRS = (("LARS", "Nesterov-1x"), ("Muon", "Nesterov-1x"), ("Muon", "LARS"))


def with_one_bend(runs: Rows, target: float) -> Crossings:
    """Return the epochs to the target by curves with the same bend, fitted to all of HEADLINE.

    Args:
        runs: All runs, some of them equal but for the seed, and a cell with three lengths.
        target: The accuracy to reach.
    """
    spreads = spreads_of(runs)
    assert spreads
    points = {}
    for cell in cells_of(runs):
        if cell[0] in HEADLINE:
            rows = finals(runs, *cell)
            points[cell] = [r["epochs"] for r in rows], [r["top1"] for r in rows], spreads[cell]
    bend = Bend.common_to(list(points.values()))
    found = {}
    for cell, (epochs, top1, spread) in points.items():
        if len(set(epochs)) > 1 and len(epochs) > 2:
            found[cell] = crossing(epochs, top1, Target(target), spread=spread, bend=bend)
    return found


def losses_at(runs: Rows, target: float) -> dict[str, float]:
    """Return the training loss of each optimizer where it meets the target at the small batch.

    It is the mean over the last half epoch, with label smoothing and augmentation, to two digits.
    """
    found = {}
    for optimizer in HEADLINE:
        meets = crossings(runs, target).get((optimizer, SMALL))
        rows = finals(runs, optimizer, SMALL)
        if meets and 0 < meets.epochs < math.inf and len({row["epochs"] for row in rows}) > 2:
            lengths, losses = zip(
                *((row["epochs"], row["train_loss"]) for row in rows), strict=True
            )
            curve = np.polyfit(np.log(lengths), losses, 2)
            found[optimizer] = round(float(np.polyval(curve, math.log(meets.epochs))), 2)
    return found


def to_equal_loss(runs: Rows, target: float) -> Crossings:
    """Return the epochs to the training loss that :func:`losses_at` gives for each optimizer."""
    losses = losses_at(runs, target)
    # A loss falls, so that its negative is what rises to a target.
    falling = [{**row, "top1": -row["train_loss"]} for row in runs]
    found: Crossings = {}
    for optimizer, loss in losses.items():
        to_loss = crossings(falling, -loss)
        found |= {cell: value for cell, value in to_loss.items() if cell[0] == optimizer}
    return found


def _row(optimizer: str, batch_size: int, shown: list[str]) -> str:
    return f"| {batch_size:,} | {name_of(optimizer)} | {' | '.join(shown)} |"


def _price(found: Crossings, optimizer: str, batch_size: int) -> str:
    price = price_of(found, optimizer, batch_size, optimizer)
    return interval(price) if price else ""


def _larger(runs: Rows) -> list[tuple[str, int]]:
    """Return the cells of :data:`HEADLINE` above the small batch, by optimizer."""
    cells = [cell for cell in cells_of(runs) if cell[0] in HEADLINE and cell[1] > SMALL]
    return sorted(cells, key=lambda cell: (HEADLINE.index(cell[0]), cell[1]))


def _tabulated(head: str, columns: list[str], rows: list[tuple[str, int, list[str]]]) -> str:
    lines = [head, "", f"| batch | optimizer | {' | '.join(columns)} |"]
    lines.append(f"|---:|---|{'---:|' * len(columns)}")
    lines += [_row(*row) for row in rows if any(text not in {"", "?"} for text in row[2])]
    return "\n".join(lines) + "\n"


def targets_table(runs: Rows, target: float) -> str:
    """Tabulate the price of each larger batch for several targets."""
    targets = [target + further for further in OTHER_TARGETS]
    by_target = [crossings(runs, other) for other in targets]
    rows = [(*cell, [_price(found, *cell) for found in by_target]) for cell in _larger(runs)]
    head = f"Epochs over those of the same optimizer at {SMALL}, by the accuracy to reach."
    return _tabulated(head, [f"{other:.2f} %" for other in targets], rows)


def luck_table(runs: Rows, target: float) -> str:
    """Tabulate the price of each larger batch, if a search had found a better setting.

    It would add :data:`LUCK` points, to the larger batch or to the small one.
    """
    found, better = crossings(runs, target), crossings(runs, target - LUCK)
    rows = []
    for optimizer, batch_size in _larger(runs):
        shown = [_price(found, optimizer, batch_size)]
        for cell in ((optimizer, batch_size), (optimizer, SMALL)):
            changed = found | {cell: better[cell]} if cell in better else {}
            shown.append(_price(changed, optimizer, batch_size))
        rows.append((optimizer, batch_size, shown))
    head = (
        f"Epochs over those of the same optimizer at {SMALL}, if a better setting added {LUCK} "
        "points."
    )
    return _tabulated(head, ["as measured", "at the larger batch", f"at {SMALL}"], rows)


def readings_table(runs: Rows, target: float) -> str:
    """Tabulate the price of each larger batch by three ways to read it from the runs."""
    readings = {
        "a curve for each": crossings(runs, target),
        "curves with one bend": with_one_bend(runs, target),
        "to equal training loss": to_equal_loss(runs, target),
    }
    rows = [
        (*cell, [_price(found, *cell) for found in readings.values()]) for cell in _larger(runs)
    ]
    losses = ", ".join(
        f"{loss:.2f} for {name_of(o)}" for o, loss in losses_at(runs, target).items()
    )
    head = (
        f"Epochs over those of the same optimizer at {SMALL}, to {target:.1f} % by two kinds of "
        f"curve, and to the training loss that the optimizer has where it reaches {target:.1f} % "
        f"at {SMALL} ({losses})."
    )
    return _tabulated(head, list(readings), rows)


def lengths_table(runs: Rows) -> str:
    """Tabulate differences at the same length, as means over all lengths that both have."""
    spreads = spreads_of(runs)
    assert spreads
    batches = sorted({batch_size for _, batch_size in cells_of(runs)})
    columns = [f"{name_of(one)} minus {name_of(other)}" for one, other in PAIRS]
    lines = [
        "Differences in accuracy at the same length, means over all lengths that both have (their "
        "number), each with the weight of its seeds.",
        "",
        f"| batch | {' | '.join(columns)} |",
        f"|---:|{'---:|' * len(columns)}",
    ]
    for batch_size in batches:
        shown = [mean_difference(runs, spreads, *pair, batch_size) for pair in PAIRS]
        lines.append(f"| {batch_size:,} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def mean_difference(runs: Rows, spreads: Spreads, one: str, other: str, batch_size: int) -> str:
    """Write the mean difference of two optimizers over the lengths that both have, "" for none.

    Args:
        runs: All runs.
        spreads: Their spread.
        one: The optimizer that is asked about.
        other: The one that is subtracted.
        batch_size: Global batch size in images.
    """
    ours, theirs = by_length(runs, one, batch_size), by_length(runs, other, batch_size)
    lengths = sorted(ours.keys() & theirs.keys())
    if not lengths:
        return ""
    # The harmonic mean of the numbers of seeds: the inverse of the variance of the difference.
    weights = [1 / (1 / len(ours[n]) + 1 / len(theirs[n])) for n in lengths]
    shares = [weight / sum(weights) for weight in weights]
    gaps = [statistics.mean(ours[n]) - statistics.mean(theirs[n]) for n in lengths]
    mean = sum(share * gap for share, gap in zip(shares, gaps, strict=True))
    # A mean with a factor varies as one of more runs does.
    means = [
        (spreads[optimizer, batch_size], len(found[n]) / share**2)
        for optimizer, found in ((one, ours), (other, theirs))
        for n, share in zip(lengths, shares, strict=True)
    ]
    half = half_of(means)
    unresolved = ", unresolved" if abs(mean) <= half else ""
    return f"{mean:+.2f} ± {half:.2f}{unresolved} ({len(lengths)})"


def checks(runs: Rows, target: float) -> str:
    """Return the tables."""
    parts = [luck_table(runs, target), LUCK_ENDS, "", targets_table(runs, target), TARGETS_END, ""]
    parts += [readings_table(runs, target), READINGS_END, "", lengths_table(runs)]
    return "\n".join(parts)
