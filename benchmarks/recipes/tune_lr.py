"""Claim: from a learning rate ten times off and without warm-up, `largebatch tune lr` finds values
within 0.5 points of the shipped recipe's accuracy, in 23 runs' worth of epochs for the digits and
in 7.5 for CIFAR-10 at 2,560.

    python -m benchmarks.recipes.tune_lr digits --data data/digits
    python -m benchmarks.recipes.tune_lr cifar10-b2560 --data data/cifar10

For each of a rate ten times too high and ten times too low, the command tunes the recipe; then the
recipe as it was (untuned), the one that was written (tuned) and the shipped one are trained on all
training images with three seeds, and evaluated on the validation set once, at the end. The interval
is Welch's, at 95 %.

Each finished measurement is stored at once and not repeated, and a search that was interrupted is
resumed: `--most 1` makes one measurement, of at most one search, and `--list` names those that are
missing. Results are written to benchmarks/results/tune_lr.json and tune_lr.md.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.recipes.spread import Spread, half_of
from largebatch.recipes.schema.load import load

FACTORS = (10.0, 0.1)
SEEDS = (0, 1, 2)
GOAL = 0.5  # points
STUDIES = Path("tuning")


@dataclass(frozen=True)
class Case:
    """A recipe to tune."""

    name: str
    budget: tuple[str, ...]
    nproc: int
    earlier: tuple[float, ...]


CASES = {
    case.name: case
    for case in (
        Case("digits", ("--runs", "22.7"), 2, (99.44, 99.72, 99.72)),
        Case("cifar10-b2560", ("--runs", "7.5"), 2, (78.27, 78.28, 78.26)),
    )
}


class Rows:
    """The finished measurements, stored in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = (
            json.loads(path.read_text())["rows"] if path.exists() else []
        )

    def find(self, **identity: Any) -> dict[str, Any] | None:
        """Return the row of a measurement, or None if it has not been made."""
        return next((row for row in self.rows if identity.items() <= row.items()), None)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row and write the file."""
        self.rows.append({**row, "date": date.today().isoformat()})
        content = {"claim": tables.claim_of(__doc__), **tables.origin(), "rows": self.rows}
        tables.store(self._path, content)


def off_by(case: Case, factor: float) -> list[str]:
    """Overrides of a rate that is off by a factor, without warm-up."""
    return [f"optimizer.lr={factor * load(case.name).recipe.optimizer.lr!r}", "schedule.warmup=0"]


def tune(case: Case, data: Path, factor: float, out: Path, extra: Sequence[str]) -> dict[str, Any]:
    """Tune a recipe from a rate that is off by a factor, and return what trials.json holds."""
    _run(
        "largebatch.recipes",
        *("tune", "lr", case.name, f"data.path={data}", *off_by(case, factor)),
        *(*extra, *case.budget, "--nproc", str(case.nproc), "--out", str(out)),
    )
    found: dict[str, Any] = json.loads((out / "trials.json").read_text())
    return found


def train(case: Case, recipe: str, data: Path, seed: int, extra: Sequence[str]) -> float | None:
    """Train a recipe on all training images, and return its accuracy on the validation set.

    None if it diverges.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            _run(
                "largebatch.recipes",
                *("train", recipe, f"data.path={data}", f"seed={seed}", f"run_dir={folder}/run"),
                *("evaluate_every=1dur", "checkpoint.every=null", "track=[]", *extra),
                *("--nproc", str(case.nproc)),
            )
        except subprocess.CalledProcessError:
            ending = json.loads(Path(folder, "run", "ending.json").read_text())
            if ending["status"] != "diverged":
                raise
            return None
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        return round(float(summary["top1"]), 2)


def _run(module: str, *arguments: str) -> None:
    """Run a command; what it shows is passed on."""
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


def missing(case: Case, rows: Rows) -> list[dict[str, Any]]:
    """What has not been measured of a recipe, in the order in which it is measured."""
    wanted: list[dict[str, Any]] = [{"kind": "shipped", "seed": seed} for seed in SEEDS]
    for factor in FACTORS:
        wanted.append({"kind": "search", "factor": factor})
        for kind in ("tuned", "untuned"):
            wanted += [{"kind": kind, "factor": factor, "seed": seed} for seed in SEEDS]
    identities = [{"recipe": case.name, **each} for each in wanted]
    return [identity for identity in identities if rows.find(**identity) is None]


def measure(
    case: Case, data: Path, rows: Rows, extra: Sequence[str] = (), most: int | None = None
) -> None:
    """Make the measurements of a recipe that are missing, at most a number of them."""
    for identity in missing(case, rows)[:most]:
        kind, factor = identity["kind"], identity.get("factor", 1.0)
        out = STUDIES / f"{case.name}-x{factor:g}"
        if kind == "search":
            found = tune(case, data, factor, out, extra)
            kept = ("best", "behind", "held_out", "epochs", "epochs_of_a_run", "seconds")
            rows.add({**identity, **{key: found[key] for key in kept}, "of": len(found["trials"])})
            continue
        recipe = str(out / "recipe.yaml") if kind == "tuned" else case.name
        off = off_by(case, factor) if kind == "untuned" else []
        rows.add({**identity, "top1": train(case, recipe, data, identity["seed"], [*off, *extra])})


def difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The difference of two means, and half of its 95 % interval by Welch's method."""
    own = [(Spread.of([values]), len(values)) for values in (first, second)]
    return statistics.mean(first) - statistics.mean(second), half_of(own)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The finished measurements as a table in Markdown."""
    sides = ("starting rate", "trials", "cost in runs", "minutes")
    columns = {"recipe": "l", **dict.fromkeys(sides, "r"), "found": "l", "neighbours": "l"}
    columns |= {f"top-1, {kind}": "l" for kind in ("untuned", "tuned", "shipped")}
    columns |= {"over shipped": "r", "goal": "l", "over the earlier search": "r"}
    cells = []
    for row in rows:
        if row["kind"] != "search":
            continue
        same = [r for r in rows if r["recipe"] == row["recipe"]]

        def of(
            kind: str, factor: float | None = row["factor"], same: list[dict[str, Any]] = same
        ) -> list[float]:
            known = [r for r in same if (r["kind"], r.get("factor")) == (kind, factor)]
            return [math.nan if r["top1"] is None else r["top1"] for r in known]

        untuned, tuned, shipped = of("untuned"), of("tuned"), of("shipped", None)
        if len(tuned) < 2 or len(shipped) < 2:
            continue
        found, half = difference(tuned, shipped)
        before = difference(tuned, CASES[row["recipe"]].earlier)
        best = row["best"]
        behind = (
            f"{points:.2f} at {rate}" if points is not None else f"divergence at {rate}"
            for rate, points in row.get("behind", {}).items()
        )
        cells.append([
            f"`{row['recipe']}`",
            f"{row['factor']:g} times",
            row["of"],
            f"{row['epochs'] / row['epochs_of_a_run']:.1f}",
            f"{row['seconds'] / 60:.1f}",
            f"rate {best['lr']:g}, warm-up {best['warmup']:.0%}",
            "behind by " + ", ".join(behind) if "behind" in row else "",
            *(_listed(values) for values in (untuned, tuned, shipped)),
            f"{found:+.2f} ± {half:.2f}",
            verdict(found, half),
            f"{before[0]:+.2f} ± {before[1]:.2f}",
        ])  # fmt: skip
    return tables.table(columns, cells) + "\n"


def _listed(top1: Sequence[float]) -> str:
    return ", ".join("diverged" if math.isnan(value) else f"{value:.2f}" for value in top1)


def verdict(found: float, half: float) -> str:
    """Say whether a difference is above minus the goal, undecided if its interval holds that."""
    if found - half >= -GOAL:
        return "met"
    return "missed" if found + half < -GOAL else "undecided"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("recipe", choices=[*CASES])
    parser.add_argument("--data", type=Path, required=True, help="the prepared data set")
    parser.add_argument("--results", type=Path, default=tables.RESULTS / "tune_lr.json")
    parser.add_argument("--most", type=int, help="make at most this number of measurements")
    parser.add_argument("--list", action="store_true", help="only name what is missing")
    options, extra = parser.parse_known_args(arguments)
    rows, case = Rows(options.results), CASES[options.recipe]
    if options.list:
        for identity in missing(case, rows):
            print(", ".join(f"{key} {value}" for key, value in identity.items()))
        return
    measure(case, options.data, rows, extra, options.most)
    text = table(rows.rows)
    options.results.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
