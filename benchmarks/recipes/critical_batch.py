"""Claim: an estimate of at most 15 minutes on 2 cores predicts the epochs to the same loss at 2 and
at 4 times its largest batch within 15 %, as measured by training there.

    largebatch data prepare digits --out data/digits
    python -m benchmarks.recipes.critical_batch --recipe digits --data data/digits
    python -m benchmarks.recipes.critical_batch --recipe cifar10-b256 --data data/cifar10

First the estimate is made, as `largebatch critical-batch` makes it, within its time. Then the
smallest batch of the estimate and those of 2 and 4 times its largest one are trained at three
lengths around the predicted one, with seeds that the estimate has not used. The loss of the
smallest batch after the length of the target run is the target; each seed has its own. The epochs
that a batch needs to reach it are interpolated on a line of log loss over log epochs. Their
interval is that of the t distribution over the seeds, on a log scale.

Learning rates follow the recipe's by its rule and are not tuned for any batch. This takes hours.
Finished runs are kept in the folder --out, and the same command continues. Results are written to
benchmarks/results/critical_batch.json and .md, one entry for each recipe, with all runs: batch
size, epochs, seed and loss of each, from which `compared` makes the rows of the table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t

from benchmarks import tables
from largebatch.recipes.ranks import Job, joined
from largebatch.recipes.schema.load import load
from largebatch.recipes.tune.critical_batch.estimate import Estimate, Runner, estimate
from largebatch.recipes.tune.critical_batch.fit import Observation, fit_losses
from largebatch.recipes.tune.critical_batch.report import describe
from largebatch.recipes.tune.critical_batch.runs import Record, Run

RESULT = tables.RESULTS / "critical_batch.json"
FACTORS = (2, 4)
LENGTHS = (0.75, 1.0, 1.35)  # in those predicted
FIRST_SEED = 100
GOAL = 0.15

Interval = tuple[float, float, float]


class Trained(NamedTuple):
    """A run as it is stored; the loss is above the lowest possible one, None if it diverged."""

    batch_size: int
    epochs: float
    seed: int
    loss: float | None
    top1: float


def check(found: Estimate, folder: Path, job: Job, seeds: int) -> list[Trained]:
    """Train the runs that check an estimate: of its smallest batch, and of larger ones."""
    critical, own = found.critical, min(found.batches)
    assert critical is not None
    base = replace(found.base, out=folder)
    runner = Runner(base, job, math.inf, lambda line: print(line, flush=True))
    runner.use(base)
    first = base.recipe.seed + FIRST_SEED
    for batch in (own, *(factor * critical.largest for factor in FACTORS)):
        length = found.epochs * critical.factor(batch, own)[0]
        if batch <= base.images:
            seen = [(s, part) for s in range(first, first + seeds) for part in LENGTHS]
            runner.make_all([Run(batch, round(length * part, 3), s) for s, part in seen])
    return [stored(record) for record in runner.records]


def stored(record: Record) -> Trained:
    """A run in the form in which it is stored."""
    loss = record.loss if math.isfinite(record.loss) else None
    return Trained(record.run.batch_size, record.trained, record.run.seed, loss, record.top1)


def line_of(runs: Sequence[Trained]) -> tuple[float, float]:
    """Slope and height of a line of log loss over log epochs through runs of one batch."""
    slope, height = np.polyfit(
        np.log([run.epochs for run in runs]), np.log([run.loss or math.nan for run in runs]), 1
    )
    return float(slope), float(height)


def measured_ratio(own: Sequence[Trained], other: Sequence[Trained], epochs: float) -> Interval:
    """Epochs of a batch in those of the smallest, with the 90 % interval over seeds."""
    logs = []
    for seed in sorted({run.seed for run in own} & {run.seed for run in other}):
        slope, height = line_of([run for run in own if run.seed == seed])
        log_loss = slope * math.log(epochs) + height
        slope, height = line_of([run for run in other if run.seed == seed])
        logs.append((log_loss - height) / slope - math.log(epochs))
    half = math.inf
    if len(logs) > 1:
        half = float(t.ppf(0.95, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    middle = fmean(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(min(middle + half, 700.0))


def compared(one: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each larger batch, from the stored runs of a recipe."""
    near, checks = ([Trained(*run) for run in one[key]] for key in ("fitted", "checks"))
    observations = [Observation(run.batch_size, run.epochs, run.loss or math.nan) for run in near]
    critical = fit_losses(observations, one["rule"])
    own, rows = min(one["batches"]), []
    for batch in sorted({run.batch_size for run in checks} - {own}):
        predicted = [one["epochs"] * factor for factor in critical.factor(batch, own)]
        runs, of_own = ([run for run in checks if run.batch_size == size] for size in (batch, own))
        row: dict[str, Any] = {
            "batch_size": batch,
            "times_largest": batch / critical.largest,
            "predicted_epochs": predicted,
            "diverged": sum(run.loss is None for run in runs),
            "top1": fmean(run.top1 for run in runs),
        }
        if all(run.loss for run in (*runs, *of_own)):
            ratio = measured_ratio(of_own, runs, one["epochs"])
            row["measured_epochs"] = [one["epochs"] * factor for factor in ratio]
            row["predicted_over_measured"] = predicted[0] / row["measured_epochs"][0]
            if critical.by_root:
                row["by_root_over_measured"] = critical.by_root.factor(batch, own)[0] / ratio[0]
        rows.append(row)
    return rows


def entry(found: Estimate, checks: list[Trained], seeds: int) -> dict[str, Any]:
    """What is stored about one recipe; the minutes are those of the estimate's training steps."""
    one = {
        "batch_size": found.base.recipe.batch_size,
        "rule": found.base.rule,
        "epochs": found.epochs,
        "batches": found.batches,
        "minutes": sum(record.seconds for record in found.records) / 60,
        "described": describe(found),
        "runs": len(found.records),
        "seeds": seeds,
        **tables.origin(),
        "fitted": [stored(record) for record in found.near],
        "checks": checks,
    }
    return {**one, "rows": compared(one)}


def table(content: dict[str, Any]) -> str:
    """The results of all recipes as Markdown."""
    columns = {"recipe": "l", "estimate from batches": "l", "runs, minutes": "r"}
    heads = ("batch", "predicted epochs", "measured epochs", "predicted / measured")
    columns |= {"critical batch (90 %)": "l", **dict.fromkeys(heads, "r")}
    columns |= {"exponent 1/2 / measured": "r"}
    cells = []
    for name, one in content.items():
        batches = ", ".join(f"{batch:,}" for batch in one["batches"])
        estimated = [name, batches, f"{one['runs']}, {one['minutes']:.1f}", one["described"]]
        for row in one["rows"]:
            ratios = [row.get(f"{by}_over_measured") for by in ("predicted", "by_root")]
            epochs = _text(row["measured_epochs"]) if ratios[0] else "not known: runs diverged"
            of_batch = [f"{row['batch_size']:,}", _text(row["predicted_epochs"]), epochs]
            cells.append([*estimated, *of_batch, *(f"{r:.2f}" if r else "" for r in ratios)])
    seen = ", ".join(
        f"{name}: {one['date']}, {one['seeds']} seeds, {one['machine']['cores']} cores of "
        f"{one['machine']['processor']}, torch {one['versions'].get('torch')}"
        for name, one in content.items()
    )
    return f"{tables.table(columns, cells)}\n\n{seen}\n"


def _text(interval: Sequence[float]) -> str:
    value, low, high = interval
    return f"{value:.3g} ({low:.3g} to {high:.3g})"


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--recipe", default="digits", help="such as digits or cifar10-b256")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--batches", type=int, nargs="*", default=[])
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--rule", choices=("linear", "sqrt"))
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("critical-batch-check"))
    parser.add_argument("--result", type=Path, default=RESULT)
    given = parser.parse_args()
    loaded = load(given.recipe, [f"data.path={given.data}", *given.set])
    folder = given.out / loaded.name
    with joined(loaded.recipe) as job:
        found = estimate(
            loaded,
            job,
            folder / "estimate",
            batches=given.batches,
            epochs=given.epochs,
            rule=given.rule,
            minutes=given.minutes,
            say=lambda line: print(line, flush=True),
        )
        print(describe(found), flush=True)
        if found.critical is None:
            raise SystemExit(1)
        checks = check(found, folder / "check", job, given.seeds)
    content = json.loads(given.result.read_text()) if given.result.exists() else {}
    content[loaded.name] = entry(found, checks, given.seeds)
    tables.store(given.result, content)
    text = table(content)
    given.result.with_suffix(".md").write_text(text)
    print(text)
    rows = content[loaded.name]["rows"]
    ratios = [row.get("predicted_over_measured", math.nan) for row in rows]
    held = len(ratios) == len(FACTORS) and all(abs(ratio - 1) <= GOAL for ratio in ratios)
    print(f"within {GOAL:.0%} at 2 and 4 times the largest batch: {'yes' if held else 'no'}")


if __name__ == "__main__":
    main()
