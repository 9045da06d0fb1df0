"""Claim: from a learning rate ten times off and without warm-up, `largebatch tune lr` finds values
within 0.5 points of the shipped recipe's accuracy: in 10 minutes on two cores for the digits, and
in 8 runs' worth of epochs for CIFAR-10 at 2,560.

    python -m benchmarks.recipes.tune_lr digits --data data/digits
    python -m benchmarks.recipes.tune_lr cifar10-b2560 --data data/cifar10

For each of a rate ten times too high and ten times too low, the command tunes the recipe; then the
recipe that it wrote and the shipped one are trained on all training images with three seeds, and
evaluated on the validation set once, at the end. The interval is Welch's, at 95 %.

A search that was interrupted is resumed, and finished runs are not repeated. Results are written to
benchmarks/results/tune_lr.json and tune_lr.md.
"""

from __future__ import annotations

import json
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
    """A recipe to tune.

    Attributes:
        name: Name of the recipe.
        budget: Options of the command.
        nproc: Processes that train together.
    """

    name: str
    budget: tuple[str, ...]
    nproc: int


CASES = {
    case.name: case
    for case in (
        Case("digits", ("--minutes", "10"), 2),
        Case("cifar10-b2560", ("--epochs", "160"), 2),
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


def tune(case: Case, data: Path, factor: float, out: Path, extra: Sequence[str]) -> dict[str, Any]:
    """Tune a recipe from a rate that is off by a factor, and return what trials.json holds."""
    rate = factor * load(case.name).recipe.optimizer.lr
    _run(
        "largebatch.recipes.commands.app",
        *("tune", "lr", case.name, f"data.path={data}", f"optimizer.lr={rate!r}"),
        *("schedule.warmup=0", *extra, *case.budget),
        *("--nproc", str(case.nproc), "--out", str(out)),
    )
    found: dict[str, Any] = json.loads((out / "trials.json").read_text())
    return found


def train(case: Case, recipe: str, data: Path, seed: int, extra: Sequence[str]) -> float:
    """Train a recipe on all training images, and return its accuracy on the validation set."""
    with tempfile.TemporaryDirectory() as folder:
        _run(
            "largebatch.recipes.commands.app",
            *("train", recipe, f"data.path={data}", f"seed={seed}", f"run_dir={folder}/run"),
            *("evaluate_every=1dur", "checkpoint.every=null", "track=[]", *extra),
            *("--nproc", str(case.nproc)),
        )
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        return round(float(summary["top1"]), 2)


def _run(module: str, *arguments: str) -> None:
    """Run a command; what it shows is passed on.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


def measure(case: Case, data: Path, rows: Rows, extra: Sequence[str] = ()) -> None:
    """Make the measurements of a recipe that are missing."""
    for seed in SEEDS:
        identity = {"recipe": case.name, "kind": "shipped", "seed": seed}
        if rows.find(**identity) is None:
            rows.add({**identity, "top1": train(case, case.name, data, seed, extra)})
    for factor in FACTORS:
        out = STUDIES / f"{case.name}-x{factor:g}"
        identity = {"recipe": case.name, "kind": "search", "factor": factor}
        if rows.find(**identity) is None:
            found = tune(case, data, factor, out, extra)
            kept = ("best", "held_out", "epochs", "epochs_of_a_run", "seconds")
            rows.add({**identity, **{key: found[key] for key in kept}, "of": len(found["trials"])})
        for seed in SEEDS:
            identity = {"recipe": case.name, "kind": "tuned", "factor": factor, "seed": seed}
            if rows.find(**identity) is None:
                top1 = train(case, str(out / "recipe.yaml"), data, seed, extra)
                rows.add({**identity, "top1": top1})


def difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The difference of two means, and half of its 95 % interval by Welch's method."""
    own = [(Spread.of([values]), len(values)) for values in (first, second)]
    return statistics.mean(first) - statistics.mean(second), half_of(own)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The finished measurements as a table in Markdown."""
    sides = ("starting rate", "trials", "cost in runs", "minutes")
    columns = {"recipe": "l", **dict.fromkeys(sides, "r"), "found": "l", "top-1, tuned": "l"}
    columns |= {"top-1, shipped": "l", "difference": "r", "goal": "l"}
    cells = []
    for row in rows:
        if row["kind"] != "search":
            continue
        same = [r for r in rows if r["recipe"] == row["recipe"]]
        tuned = [
            r["top1"] for r in same if (r["kind"], r.get("factor")) == ("tuned", row["factor"])
        ]
        shipped = [r["top1"] for r in same if r["kind"] == "shipped"]
        if len(tuned) < 2 or len(shipped) < 2:
            continue
        found, half = difference(tuned, shipped)
        best = row["best"]
        cells.append([
            f"`{row['recipe']}`",
            f"{row['factor']:g} times",
            row["of"],
            f"{row['epochs'] / row['epochs_of_a_run']:.1f}",
            f"{row['seconds'] / 60:.1f}",
            f"rate {best['lr']:g}, warm-up {best['warmup']:.0%}",
            *(", ".join(f"{value:.2f}" for value in top1) for top1 in (tuned, shipped)),
            f"{found:+.2f} ± {half:.2f}",
            verdict(found, half),
        ])  # fmt: skip
    return tables.table(columns, cells) + "\n"


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
    options, extra = parser.parse_known_args(arguments)
    rows = Rows(options.results)
    measure(CASES[options.recipe], options.data, rows, extra)
    text = table(rows.rows)
    options.results.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
