"""Confidence intervals for the comparison of optimizers in benchmarks/results/large_batch.json."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

from scipy.stats import t

from benchmarks.recipes.large_batch_report import NAMES, accuracies
from benchmarks.recipes.large_batch_starts import BATCHES
from benchmarks.tables import RESULTS

#: The cell whose seeds spread several times as much as those of any other.
_WIDE = ("nesterov", 8192)


#: What is compared: one cell minus another, for each batch size.
_PAIRS = {
    "LARS minus SGD": (("lars", None), ("nesterov", None)),
    "LARS minus SGD at 256": (("lars", None), ("nesterov", BATCHES[0])),
    "LARS minus LARS at 256": (("lars", None), ("lars", BATCHES[0])),
    "Muon minus LARS": (("muon", None), ("lars", None)),
    "Muon minus SGD": (("muon", None), ("nesterov", None)),
    "Muon minus SGD at 256": (("muon", None), ("nesterov", BATCHES[0])),
    "Muon minus Muon at 256": (("muon", None), ("muon", BATCHES[0])),
}


OF_MUON = [pair for pair in _PAIRS if pair.startswith("Muon")]
OF_BATCHES = [pair for pair in _PAIRS if pair.startswith("LARS") and pair.endswith("at 256")]


def rows() -> list[dict[str, Any]]:
    """The finished runs of the grid."""
    content = json.loads((RESULTS / "large_batch.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = content["runs"]
    return found


def loss_and_accuracy() -> str:
    """How far the final training loss of a run tells its accuracy on the test set, in a line."""
    tested = [row for row in rows() if row["kind"] == "final" and row["optimizer"] != "muon"]
    loss, top1 = ([row[key] for row in tested] for key in ("train_loss", "top1"))
    r, count = statistics.correlation(loss, top1), len(tested)
    # Fisher's transformation.
    half = 1.959964 / math.sqrt(count - 3)
    low, high = (math.tanh(math.atanh(r) + sign * half) for sign in (-1, 1))
    return (
        f"  Over the {count} runs of LARS and SGD on the test set, their correlation is {r:.3f} "
        f"(95 % interval {low:.3f} to {high:.3f}).\n"
    )


def table(pairs: Sequence[str] = ("LARS minus SGD",)) -> str:
    """Differences at each batch size, with 95 % intervals, as a table in Markdown.

    Args:
        pairs: Keys of :data:`_PAIRS`.
    """
    cells = {(o, b): accuracies(rows(), o, b) for b in BATCHES for o in NAMES}
    alike = [values for cell, values in cells.items() if cell != _WIDE and len(values) > 1]
    freedom = sum(len(values) - 1 for values in alike)
    pooled = math.sqrt(
        sum(statistics.variance(values) * (len(values) - 1) for values in alike) / freedom
    )
    lines = [
        "| batch | difference in top-1 | points | 95 % interval | |",
        "|---:|---|---:|---:|---|",
    ]
    for batch, name in product(BATCHES, pairs):
        sides = [(optimizer, at or batch) for optimizer, at in _PAIRS[name]]
        first, second = (cells[side] for side in sides)
        if sides[0] == sides[1] or not first or not second:
            continue
        difference = statistics.mean(first) - statistics.mean(second)
        if _WIDE in sides:
            half = _welch(first, second)
        else:
            half = t.ppf(0.975, freedom) * pooled * math.sqrt(1 / len(first) + 1 / len(second))
        verdict = "unresolved" if abs(difference) < half else "resolved"
        low, high = difference - half, difference + half
        lines.append(
            f"| {batch:,} | {name} | {difference:+.2f} | {low:+.2f} to {high:+.2f} | {verdict} |"
        )
    lines += [
        "",
        f"Student's t with the pooled standard deviation of all cells but SGD at {_WIDE[1]:,}: "
        f"{pooled:.2f} points, {freedom} degrees of freedom. At {_WIDE[1]:,}, where SGD's seeds "
        "spread more, Welch's interval for SGD.",
    ]
    return "\n".join(lines) + "\n"


def _welch(first: list[float], second: list[float]) -> float:
    """Half of Welch's 95 % interval for the difference of two means."""
    a, b = (statistics.variance(values) / len(values) for values in (first, second))
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return float(t.ppf(0.975, freedom)) * math.sqrt(a + b)
