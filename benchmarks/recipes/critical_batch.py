"""Claim: an estimate of at most 15 minutes on 2 cores predicts the epochs to the same loss at 2 and
at 4 times its largest batch within 15 %, as measured by training there.

    largebatch data prepare digits --out data/digits
    python -m benchmarks.recipes.critical_batch --recipe digits --data data/digits [--workers 2]
    python -m benchmarks.recipes.critical_batch --recipe cifar10-b256 --data data/cifar10

First the estimate is made, as `largebatch critical-batch` makes it, within its budget. Then the
smallest batch of the estimate and those of 2 and 4 times its largest one are trained at three
lengths around the predicted one, with seeds that the estimate has not used. The loss of the
smallest batch after the length of the target run is the target; each seed has its own. The epochs
that a batch needs to reach it are interpolated on a line of log loss over log epochs. Their
interval is that of the t distribution over the seeds, on a log scale.

Learning rates follow the recipe's by its rule and are not tuned for any batch. This takes hours.
Finished runs are kept in the folder --out, and the same command continues. Results are written to
benchmarks/results/critical_batch.json and .md, one entry for each recipe.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy.stats import t

from benchmarks import tables
from largebatch.recipes.ranks import Job, joined
from largebatch.recipes.schema.load import RECIPE, load
from largebatch.recipes.tune.critical_batch.estimate import Budget, Runner, estimate
from largebatch.recipes.tune.critical_batch.journal import Journal, Record
from largebatch.recipes.tune.critical_batch.report import describe, epochs_by_noise, gradient_noise
from largebatch.recipes.tune.critical_batch.result import Estimate
from largebatch.recipes.tune.critical_batch.runs import Run

RESULT = tables.RESULTS / "critical_batch.json"
FACTORS = (2, 4)
LENGTHS = (0.75, 1.0, 1.35)  # in those predicted
FIRST_SEED = 100
GOAL = 0.15

Interval = tuple[float, float, float]


def plan(found: Estimate, seeds: int, made: Sequence[Run] = ()) -> dict[int, list[Run]]:
    """The runs of each batch size that check an estimate: its smallest, and larger ones.

    Those of an earlier check are kept where they lie around the predicted length.
    """
    critical = found.critical
    assert critical is not None
    own = min(found.batches)
    batches = [own, *(factor * critical.largest for factor in FACTORS)]
    runs: dict[int, list[Run]] = {}
    for batch in batches:
        length = found.epochs * critical.factor(batch, own)[0]
        first = found.base.recipe.seed + FIRST_SEED
        for seed in range(first, first + seeds if batch <= found.base.images else first):
            earlier = [run for run in made if (run.batch_size, run.seed) == (batch, seed)]
            around = {run.epochs < length for run in earlier} == {True, False}
            if len(earlier) < len(LENGTHS) or not around:
                earlier = [Run(batch, round(length * part, 3), seed) for part in LENGTHS]
            runs.setdefault(batch, []).extend(earlier)
    return runs


def line_of(runs: Sequence[Record]) -> tuple[float, float]:
    """Slope and height of a line of log loss over log epochs through runs of one batch."""
    epochs, losses = (
        [math.log(x) for x in xs] for xs in zip(*((r.trained, r.loss) for r in runs), strict=True)
    )
    slope, height = np.polyfit(epochs, losses, 1)
    return float(slope), float(height)


def measured_ratio(own: Sequence[Record], other: Sequence[Record], epochs: float) -> Interval:
    """Epochs of a batch in those of the smallest, with the 90 % interval over seeds."""
    seeds = sorted({record.run.seed for record in own} & {record.run.seed for record in other})
    logs = []
    for seed in seeds:
        of_own = [record for record in own if record.run.seed == seed]
        of_other = [record for record in other if record.run.seed == seed]
        slope, height = line_of(of_own)
        log_loss = slope * math.log(epochs) + height
        slope, height = line_of(of_other)
        logs.append((log_loss - height) / slope - math.log(epochs))
    half = math.inf
    if len(logs) > 1:
        half = float(t.ppf(0.95, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    middle = fmean(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(min(middle + half, 700.0))


def check(found: Estimate, out: Path, job: Job, seeds: int, workers: int) -> list[dict[str, Any]]:
    """Train what checks an estimate, and return a row for each larger batch."""
    base = found.base
    there = replace(base, path=out / f"of-{base.one_pass}-images-per-pass" / RECIPE)
    journal = Journal(there, job)
    runner = Runner(there, job, journal, Budget(), workers, lambda line: print(line, flush=True))
    runs = plan(found, seeds, [record.run for record in journal.records])
    runner.make_all([run for of_batch in runs.values() for run in of_batch])
    ended = {
        batch: [r for r in map(journal.find, of_batch) if r and r.status == "finished"]
        for batch, of_batch in runs.items()
    }
    own = min(found.batches)
    critical = found.critical
    assert critical is not None
    rows = []
    for batch in runs:
        if batch == own:
            continue
        predicted = [found.epochs * factor for factor in critical.factor(batch, own)]
        row: dict[str, Any] = {
            "batch_size": batch,
            "times_largest": batch / critical.largest,
            "predicted_epochs": predicted,
            "diverged": len(runs[batch]) - len(ended[batch]),
            "top1": fmean(r.top1 for r in ended[batch]) if ended[batch] else None,
        }
        if not row["diverged"] and len(ended[own]) == len(runs[own]):
            ratio = measured_ratio(ended[own], ended[batch], found.epochs)
            row["measured_epochs"] = [found.epochs * factor for factor in ratio]
            row["predicted_over_measured"] = predicted[0] / (found.epochs * ratio[0])
            if critical.by_root:
                by_root = critical.by_root.factor(batch, own)[0]
                row["by_root_over_measured"] = by_root / ratio[0]
            if by_noise := epochs_by_noise(found, batch):
                row["by_noise_over_measured"] = by_noise[0] / (found.epochs * ratio[0])
        rows.append(row)
    return rows


def entry(found: Estimate, rows: list[dict[str, Any]], seeds: int) -> dict[str, Any]:
    """What is stored about one recipe."""
    critical = found.critical
    assert critical is not None
    interval = [critical.batch_size, critical.low, critical.high]
    return {
        "batch_size": found.base.recipe.batch_size,
        "rule": found.base.rule,
        "epochs": found.epochs,
        "batches": found.batches,
        "minutes": found.seconds / 60,
        "critical_batch": [float(v) if math.isfinite(v) else None for v in interval],
        "described": describe(found, "whole runs"),
        "runs": sum(record.kind == "run" for record in found.records),
        "gradient_noise": {
            part: scale if math.isfinite(scale) else None
            for part, scale in (gradient_noise(found) or {}).items()
        },
        "seeds": seeds,
        **tables.origin(),
        "rows": rows,
    }


def table(content: dict[str, Any]) -> str:
    """The results of all recipes as Markdown."""
    heads = ("noise scale", "batch", "predicted epochs", "measured epochs", "predicted / measured")
    heads += ("exponent 1/2 / measured", "by noise / measured")
    columns = {"recipe": "l", "estimate from batches": "l", "runs, minutes": "r"}
    columns |= {"critical batch (90 %)": "l", **dict.fromkeys(heads, "r")}
    cells = []
    for name, one in content.items():
        noise = one["gradient_noise"]
        estimated = [
            name,
            ", ".join(f"{batch:,}" for batch in one["batches"]),
            f"{one['runs']}, {one['minutes']:.1f}",
            one["described"],
            f"{noise['mean']:,.0f}" if noise else "",
        ]
        for row in one["rows"]:
            ratios = [row.get(f"{by}_over_measured") for by in ("predicted", "by_root", "by_noise")]
            epochs = _text(row["measured_epochs"]) if ratios[0] else "not known: runs diverged"
            cells.append([
                *estimated, f"{row['batch_size']:,}", _text(row["predicted_epochs"]), epochs,
                *(f"{ratio:.2f}" if ratio else "" for ratio in ratios),
            ])  # fmt: skip
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
    parser.add_argument("--workers", type=int, default=1)
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
            budget=Budget(minutes=given.minutes),
            workers=given.workers,
            say=lambda line: print(line, flush=True),
        )
        print(describe(found, "whole runs"), flush=True)
        if found.critical is None:
            raise SystemExit(1)
        rows = check(found, folder / "check", job, given.seeds, given.workers)
    content = json.loads(given.result.read_text()) if given.result.exists() else {}
    content[loaded.name] = entry(found, rows, given.seeds)
    tables.store(given.result, content)
    text = table(content)
    given.result.with_suffix(".md").write_text(text)
    print(text)
    ratios = [row.get("predicted_over_measured", math.nan) for row in rows]
    held = len(ratios) == len(FACTORS) and all(abs(ratio - 1) <= GOAL for ratio in ratios)
    print(f"within {GOAL:.0%} at 2 and 4 times the largest batch: {'yes' if held else 'no'}")


if __name__ == "__main__":
    main()
