"""The epochs to a target, and the price of a batch, from the runs of epochs_to_target.json."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.recipes.crossing import Crossing, Target, crossing, misfit_of, ratio
from benchmarks.recipes.spread import Spreads

Rows = list[dict[str, Any]]

#: The cell, and the number of its seeds, whose mean is the target.
TARGET_CELL, TARGET_SEEDS = ("Nesterov", 256), 3
SMALL, TEN_TIMES = 256, 2560
IMAGES = 50_000

#: The optimizers of the overview and the plot, in this order. SGD is there with the learning rate
#: of biases that serves it better here.
HEADLINE = ("Nesterov-1x", "LARS", "Muon", "LAMB")

#: Epochs to a target by cell: optimizer and batch size.
Crossings = dict[tuple[str, int], Crossing]


#: What is shown for names of the results that do not say which optimizer it is. The number is the
#: learning rate of biases over that of the other weights.
_NAMES = {"Nesterov": "SGD (biases 64×)", "Nesterov-1x": "SGD"}


def name_of(optimizer: str) -> str:
    """Return what is shown for an optimizer of the results."""
    return _NAMES.get(optimizer, optimizer)


def finals(runs: Rows, optimizer: str, batch_size: int, epochs: float | None = None) -> Rows:
    """Return the runs of a cell, of one length or of all, in the order of their seeds."""
    found = [r for r in runs if (r["optimizer"], r["batch_size"]) == (optimizer, batch_size)]
    return sorted(
        (r for r in found if epochs is None or r["epochs"] == epochs), key=lambda r: r["seed"]
    )


def target_of(runs: Rows, epochs: float) -> float:
    """Return the accuracy to reach, to a tenth of a point: the mean of runs of that length."""
    found = finals(runs, *TARGET_CELL, epochs)[:TARGET_SEEDS]
    return round(statistics.mean(row["top1"] for row in found), 1)


def cells_of(runs: Rows) -> list[tuple[str, int]]:
    """Return the cells that have runs, by batch size."""
    return sorted({(r["optimizer"], r["batch_size"]) for r in runs}, key=lambda c: (c[1], c[0]))


def groups_of(runs: Rows, optimizer: str, batch_size: int) -> list[list[float]]:
    """Return the accuracies of a cell, a list for each length."""
    found: dict[float, list[float]] = {}
    for row in finals(runs, optimizer, batch_size):
        found.setdefault(row["epochs"], []).append(row["top1"])
    return list(found.values())


def spreads_of(runs: Rows) -> Spreads:
    """Return the spread between seeds of each cell."""
    return Spreads.of({cell: groups_of(runs, *cell) for cell in cells_of(runs)})


def crossings(runs: Rows, target: float) -> Crossings:
    """Return the epochs to the target of all cells that have enough runs."""
    spreads, estimates, points = spreads_of(runs), {}, {}
    for cell in cells_of(runs):
        found = finals(runs, *cell)
        points[cell] = [r["epochs"] for r in found], [r["top1"] for r in found]
    usual = [points[cell] for cell in points if cell not in spreads.apart]
    misfit = misfit_of(usual, spreads.usual)
    for cell, (lengths, top1) in points.items():
        spread = spreads[cell]
        try:
            estimates[cell] = crossing(lengths, top1, Target(target), spread=spread, misfit=misfit)
        except ValueError:  # too few runs
            continue
    return estimates


def never_reached(runs: Rows, optimizer: str, batch_size: int, target: float) -> bool:
    """Whether the 95 % interval of a cell's accuracy is below the target at each length."""
    spreads = spreads_of(runs)

    def highest(group: list[float]) -> float:
        return statistics.mean(group) + spreads[optimizer, batch_size].half(len(group))

    return all(highest(group) < target for group in groups_of(runs, optimizer, batch_size))


def price_of(
    found: Crossings, optimizer: str, batch_size: int, small: str | None
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
