"""Claim: a tenth of the rate at which a range test diverges is nearer to the tuned peak learning
rate than the rate of the steepest descent, for LARS, SGD and Muon on digits and CIFAR-10.

    python -m benchmarks.recipes.lr_range --digits data/digits --cifar10 data/cifar10

The range test of `largebatch tune lr RECIPE --range` is run once for each recipe, with the default
number of updates, from 0.001 to 100: the range does not know the tuned rate. The table compares
rules for the peak with the rate that the recipe was tuned to. Finished tests are kept in
benchmarks/results/lr_range.json and are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from largebatch.recipes.ranks import joined
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.summary import processor, versions
from largebatch.recipes.tune.learning_rate.range_report import numbers
from largebatch.recipes.tune.learning_rate.range_test import range_test

RESULTS = Path(__file__).parents[1] / "results" / "lr_range.json"
RECIPES = (
    "digits",
    *("cifar10-b256", "cifar10-b2560"),
    *("cifar10-nesterov-b256", "cifar10-nesterov-b2560"),
    *("cifar10-muon-b256", "cifar10-muon-b2560"),
)
RATES = (1e-3, 1e2)

Row = dict[str, Any]

#: Rules for the peak, from the results of a test; None where the test does not decide.
RULES: dict[str, Callable[[Row], float | None]] = {
    "steepest descent": lambda row: row["steepest_lr"],
    "lowest loss": lambda row: row["lowest_lr"],
    "lowest loss / 10": lambda row: row["lowest_lr"] / 10,
    "diverging rate": lambda row: row["diverging_lr"],
    "diverging rate / 10": lambda row: row["diverging_lr"] and row["diverging_lr"] / 10,
}


def table(rows: list[Row]) -> str:
    """Tabulate what each rule gives, over the tuned rate, and the typical factor between them."""
    lines = [
        "| recipe | updates | tuned peak | diverges at | "
        + " | ".join(f"{rule}, over tuned" for rule in RULES)
        + " |",
        "|---|---:|---:|---:|" + "---:|" * len(RULES),
    ]
    factors: dict[str, list[float]] = {rule: [] for rule in RULES}
    for row in rows:
        cells = []
        for rule, peak in RULES.items():
            found = peak(row)
            cells.append("" if found is None else f"{found / row['present_lr']:.2g}")
            if found is not None:
                factors[rule].append(abs(math.log(found / row["present_lr"])))
        diverges = "no" if row["diverging_lr"] is None else f"{row['diverging_lr']:.3g}"
        lines.append(
            f"| {row['recipe']} | {len(row['lr'])} | {row['present_lr']:g} | {diverges} | "
            f"{' | '.join(cells)} |"
        )
    for name, reduce in (("geometric mean", statistics.mean), ("largest", max)):
        cells = [f"{math.exp(reduce(each)):.2g}" if each else "" for each in factors.values()]
        lines.append(f"| factor between them, {name} | | | | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def report(path: Path) -> str:
    """Write the table beside the results and return it."""
    content = json.loads(path.read_text())
    rows = sorted(content["tests"], key=lambda row: RECIPES.index(row["recipe"]))
    dates = sorted({row["date"] for row in rows})
    about = ", ".join(
        [
            "one test each",
            " to ".join(dict.fromkeys((dates[0], dates[-1]))),
            " and ".join(sorted({row["processor"] for row in rows})),
            *(f"{package} {number}" for package, number in content["versions"].items()),
        ]
    )
    text = f"{table(rows)}\n{about}\n"
    path.with_suffix(".md").write_text(text)
    return text


def run_missing(path: Path, folders: dict[str, Path], recipes: tuple[str, ...] = RECIPES) -> None:
    """Run the tests that are not in the file yet, and write the file after each."""
    rows: list[Row] = json.loads(path.read_text())["tests"] if path.exists() else []
    for recipe in recipes:
        if any(row["recipe"] == recipe for row in rows):
            continue
        overrides = [f"data.path={folders[recipe.partition('-')[0]]}"]
        with joined(load(recipe, overrides).recipe) as job, tempfile.TemporaryDirectory() as folder:
            found = range_test(recipe, overrides, job, Path(folder) / "run", lr=RATES)
        today = {"date": date.today().isoformat(), "processor": processor()}
        rows.append({**numbers(found), **today})
        content = {
            "claim": " ".join((__doc__ or "").partition("\n\n")[0].split()),
            "cores": len(os.sched_getaffinity(0)),
            "versions": versions(),
            "tests": rows,
        }
        path.write_text(json.dumps(content) + "\n")
        print(f"{recipe}: diverges at {found.findings.diverging_lr}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--digits", type=Path, required=True, help="prepared digits")
    parser.add_argument("--cifar10", type=Path, required=True, help="prepared CIFAR-10")
    options = parser.parse_args()
    run_missing(RESULTS, {"digits": options.digits, "cifar10": options.cifar10})
    print(report(RESULTS))


if __name__ == "__main__":
    main()
