"""The goals of epochs_to_target.py: which are met, and what gain in accuracy would change that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.recipes.crossing import Crossing, interval
from benchmarks.recipes.epochs_to_target_estimates import (
    SMALL,
    Crossings,
    Rows,
    best_at,
    crossings,
    name_of,
    price_of,
)

#: The goals, by batch size: epochs over those of the small batch, for LARS and for the best.
GOALS_OF_LARS = {2560: 1.6}
GOALS_OF_BEST = {2560: 1.0, 4096: 1.1, 8192: 1.5}

#: Points of accuracy that a better setting might add, in the order in which they are tried.
GAINS = tuple(float(gain) for gain in np.round(np.arange(0.05, 1.001, 0.05), 2))


@dataclass(frozen=True)
class Goal:
    """A limit for the epochs of a configuration over those of one at the small batch.

    Attributes:
        text: What it is called.
        optimizer: Its name in the results.
        batch_size: Global batch size in images.
        small: The optimizer at the small batch.
        limit: The limit.
    """

    text: str
    optimizer: str
    batch_size: int
    small: str
    limit: float


def goals_of(found: Crossings) -> list[Goal]:
    """Return the goals that the estimates suffice for."""
    goals = [
        Goal(f"LARS at {batch_size:,}: at most {limit} times", "LARS", batch_size, "LARS", limit)
        for batch_size, limit in GOALS_OF_LARS.items()
    ]
    small = best_at(found, SMALL)
    for batch_size, limit in GOALS_OF_BEST.items():
        best = best_at(found, batch_size)
        if best and small and ("Muon", batch_size) in found:
            text = f"the best at {batch_size:,} ({name_of(best)}), over the best at {SMALL} "
            text += f"({name_of(small)}): at most {limit} times"
            goals.append(Goal(text, best, batch_size, small, limit))
    return [g for g in goals if price_of(found, g.optimizer, g.batch_size, g.small)]


def verdict(price: Crossing, limit: float) -> str:
    """Say whether a price is within a limit, undecided if its interval holds the limit."""
    if price.low <= limit < price.high:
        return "undecided"
    return "met" if price.high <= limit else "missed"


def goals_table(runs: Rows, target: float) -> str:
    """Tabulate for each goal whether it is met, missed or undecided.

    How good a setting the search of a configuration found is in no interval. The last column is the
    least gain in accuracy by a better one that would leave the verdict undecided: at the small
    batch if the goal is met, at the larger one if it is missed.
    """
    found = crossings(runs, target)
    better = {gain: crossings(runs, target - gain) for gain in GAINS}
    lines = [
        f"| goal: epochs over those at {SMALL} | measured | undecided if a better setting adds |",
        "|---|---|---|",
    ]
    for goal in goals_of(found):
        cell = goal.optimizer, goal.batch_size
        price = price_of(found, *cell, goal.small)
        assert price
        said = verdict(price, goal.limit)
        better_cell, where = {
            "met": ((goal.small, SMALL), f"at {SMALL}"),
            "missed": (cell, f"at {goal.batch_size:,}"),
        }.get(said, (None, ""))
        change = ""
        if better_cell:
            change = f"more than {GAINS[-1]:.1f} points {where}"
            for gain in GAINS:
                there = better[gain].get(better_cell)
                changed = there and price_of(found | {better_cell: there}, *cell, goal.small)
                if changed and verdict(changed, goal.limit) != said:
                    change = f"{gain:.2f} points {where}"
                    break
        lines.append(f"| {goal.text} | **{said}**: {interval(price)} | {change} |")
    return "\n".join(lines) + "\n"
