"""Confidence intervals for the comparison of optimizers in benchmarks/results/large_batch.json."""

from __future__ import annotations

import json
import math
import statistics

from scipy.stats import t

from benchmarks.recipes.large_batch_report import accuracies
from benchmarks.recipes.large_batch_starts import BATCHES
from benchmarks.tables import RESULTS

#: The cell whose seeds spread several times as much as those of any other.
_WIDE = ("nesterov", 8192)


def table() -> str:
    """LARS minus SGD at each batch size, with a 95 % interval, as a table in Markdown."""
    rows = json.loads((RESULTS / "large_batch.json").read_text(encoding="utf-8"))["runs"]
    cells = {(o, b): accuracies(rows, o, b) for b in BATCHES for o in ("lars", "nesterov")}
    alike = [values for cell, values in cells.items() if cell != _WIDE]
    freedom = sum(len(values) - 1 for values in alike)
    pooled = math.sqrt(
        sum(statistics.variance(values) * (len(values) - 1) for values in alike) / freedom
    )
    lines = [
        "| batch | LARS minus SGD, points | 95 % interval | |",
        "|---:|---:|---:|---|",
    ]
    for batch in BATCHES:
        lars, sgd = cells["lars", batch], cells["nesterov", batch]
        difference = statistics.mean(lars) - statistics.mean(sgd)
        if ("nesterov", batch) == _WIDE:
            half = _welch(lars, sgd)
        else:
            half = t.ppf(0.975, freedom) * pooled * math.sqrt(1 / len(lars) + 1 / len(sgd))
        verdict = "unresolved" if abs(difference) < half else "resolved"
        low, high = difference - half, difference + half
        lines.append(f"| {batch:,} | {difference:+.2f} | {low:+.2f} to {high:+.2f} | {verdict} |")
    lines += [
        "",
        f"Student's t with the pooled standard deviation of all cells but SGD at {_WIDE[1]:,}: "
        f"{pooled:.2f} points, {freedom} degrees of freedom. At {_WIDE[1]:,}, where SGD's seeds "
        "spread more, Welch's interval.",
    ]
    return "\n".join(lines) + "\n"


def _welch(first: list[float], second: list[float]) -> float:
    """Half of Welch's 95 % interval for the difference of two means."""
    a, b = (statistics.variance(values) / len(values) for values in (first, second))
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return float(t.ppf(0.975, freedom)) * math.sqrt(a + b)
