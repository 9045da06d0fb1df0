"""Render ablations.json as a table."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from scipy.stats import t

from benchmarks.recipes.large_batch_single import Rows

#: The variant that the others are compared with: the recipe as it is.
WHOLE = "mlperf"
#: Dialects of LARS, each with a rate of its own.
DIALECTS = (WHOLE, "mlperf-corrected", "torch", "larc")


def tried_rates(rows: Rows, dialect: str) -> list[float]:
    """Return the rates of a dialect's trials on held-out images, in their order."""
    return [r["lr"] for r in rows if (r["kind"], r["variant"]) == ("trial", dialect)]


def best_rate(rows: Rows, dialect: str) -> float:
    """Return the rate of a dialect's best trial on held-out images."""
    tried = [r for r in rows if (r["kind"], r["variant"]) == ("trial", dialect)]
    best: float = max(tried, key=lambda row: row["top1"])["lr"]
    return best


def by_seed(rows: Rows, variant: str) -> dict[int, float]:
    """Return the accuracy of a variant on the test set, by seed."""
    return {r["seed"]: r["top1"] for r in rows if (r["kind"], r["variant"]) == ("final", variant)}


def interval(differences: list[float]) -> tuple[float, float]:
    """Return the mean of paired differences and half of its 95 % interval (Student's t)."""
    number = len(differences)
    error = statistics.stdev(differences) / math.sqrt(number)
    return statistics.mean(differences), float(t.ppf(0.975, number - 1)) * error


def table(rows: Rows) -> str:
    """Tabulate each variant, and its difference from the whole recipe over the same seeds."""
    whole = by_seed(rows, WHOLE)
    lines = [
        "| variant | learning rate | top-1 % on the test set | minus the whole recipe, "
        "95 % interval | | seeds |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for variant in dict.fromkeys(r["variant"] for r in rows if r["kind"] == "final"):
        top1 = by_seed(rows, variant)
        rate = next(r["lr"] for r in rows if (r["kind"], r["variant"]) == ("final", variant))
        spread = f" ± {statistics.stdev(top1.values()):.2f}" if len(top1) > 1 else ""
        name = "the whole recipe (dialect mlperf)" if variant == WHOLE else variant
        name = f"dialect {name}" if variant in DIALECTS and variant != WHOLE else name
        lines.append(
            f"| {name} | {rate:g} | {statistics.mean(top1.values()):.2f}{spread} "
            f"| {_difference(top1, whole) if variant != WHOLE else ' | '} | {len(top1)} |"
        )
    return "\n".join(lines) + "\n"


def _difference(top1: dict[int, float], whole: dict[int, float]) -> str:
    pairs = [top1[seed] - whole[seed] for seed in sorted(top1.keys() & whole.keys())]
    if len(pairs) < 2:
        return "one seed | "
    mean, half = interval(pairs)
    verdict = "unresolved" if abs(mean) <= half else "above" if mean > 0 else "below"
    return f"{mean:+.2f}, {mean - half:+.2f} to {mean + half:+.2f} | {verdict}"


def trial_table(rows: Rows) -> str:
    """Tabulate the rates that each dialect tried."""
    lines = [
        "| dialect | learning rate | top-1 % on held-out images |",
        "|---|---:|---:|",
    ]
    for row in sorted(
        (r for r in rows if r["kind"] == "trial"),
        key=lambda r: (DIALECTS.index(r["variant"]), r["lr"]),
    ):
        lines.append(f"| {row['variant']} | {row['lr']:g} | {row['top1']:.2f} |")
    return "\n".join(lines) + "\n"


def write(path: Path) -> str:
    """Write the tables next to the results, and return them."""
    content = json.loads(path.read_text())
    rows, machine = content["runs"], content["machine"]
    days = sorted({row["date"] for row in rows})
    span = " to ".join(dict.fromkeys((days[0], days[-1])))
    packages = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    origin = (
        f"{len(rows)} runs, {span}, {machine['processor']}, {machine['cores']} cores, {packages}\n"
    )
    text = "\n".join([table(rows), trial_table(rows), origin])
    path.with_suffix(".md").write_text(text)
    return text
