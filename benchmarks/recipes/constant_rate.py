"""Claim: on one cell, SGD with Nesterov momentum at 256 on CIFAR-10, the epochs to an accuracy read
from runs at a constant learning rate, with averaged weights, agree within 10 % with those of runs
that each have a schedule of their own length.

    largebatch data prepare cifar10 --archive FILE --out data/cifar10
    python -m benchmarks.recipes.constant_rate --data data/cifar10

If they agree, one run per seed gives the accuracy at all lengths. The runs with schedules are those
of epochs_to_target.py, which must have trained the cell. The average is an exponential one whose
decay rises with the number of updates n as (1 + n) / (10 + n), so that it covers about the last
tenth of the run at any length. The constant rate is chosen among the cell's tuned peak and four
fractions of it, by the averaged weights on held-out training images. The final runs train on all
images, and their averages are evaluated on the test set at several lengths.

Finished runs are written to benchmarks/results/constant_rate.json and are not repeated: about half
an hour on two cores.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.airbench_optimizers import RECIPE
from benchmarks.recipes import epochs_to_target as grid
from benchmarks.recipes.crossing import Crossing, Target, crossing, interval, ratio
from benchmarks.recipes.epochs_to_target_estimates import (
    TARGET_CELL,
    finals,
    search_of,
    spreads_of,
    target_of,
)
from benchmarks.recipes.large_batch_single import Rows, Single, parser, provenance, run_missing
from benchmarks.recipes.large_batch_starts import HELD_OUT
from benchmarks.recipes.spread import Spread
from benchmarks.tables import RESULTS

RESULT = RESULTS / "constant_rate.json"

#: Rates that are tried, over the tuned peak.
FRACTIONS = (1.0, 0.5, 0.25, 0.125, 0.0625)
#: Epochs of the trials and of the final runs, and between two evaluations.
TRIED, TRAINED, EVERY = 16, 20, 3.2
SEEDS = (0, 1, 2)
#: How far the two ways may differ.
LIMIT = 1.1


def run(best: dict[str, Any], fraction: float, *, epochs: int, seed: int, final: bool) -> Single:
    """Return a run at a constant rate.

    Args:
        best: What the search of the cell found.
        fraction: The rate over the tuned peak.
        epochs: Length of the run.
        seed: Seed of the weights and of the order of images.
        final: Whether it is evaluated on the test set, and trained on all training images.
    """
    lr = float(f"{fraction * best['lr']:.3g}")
    overrides = [
        *grid.cell_overrides(*TARGET_CELL, epochs),
        *("schedule.name=constant", "schedule.power=2", "schedule.warmup=1ep"),
        *(f"optimizer.lr={lr}", f"optimizer.momentum={best['momentum']}", f"seed={seed}"),
        *("ema.decay=0.9999", "ema.warmup=true", f"evaluate_every={EVERY}ep"),
        *([] if final else [f"data.holdout={HELD_OUT}"]),
    ]
    identity = {"final": final, "lr": lr, "epochs": epochs, "seed": seed}
    return Single(RECIPE, overrides, identity)


def curve(metrics: Rows) -> dict[str, Any]:
    """Return the accuracy of the averaged weights, in percent, by epochs."""
    found = [line for line in metrics if line["split"] == "val"]
    return {"average": [[round(m["epoch"], 2), round(m["ema_top1"], 2)] for m in found]}


def chosen(rows: Rows) -> float:
    """Return the rate whose trial ended best."""
    trials = [row for row in rows if not row["final"]]
    return float(max(trials, key=lambda row: row["average"][-1][1])["lr"])


def compare(
    rows: Rows, scheduled: Rows, target: float, spread: Spread | None = None
) -> tuple[Crossing, Crossing, Crossing]:
    """Return the epochs to the target with schedules and at a constant rate, and their ratio.

    The points of a run at a constant rate are not independent: each run is one crossing, and the
    interval of their geometric mean is Student's t.

    Args:
        rows: The runs at a constant rate.
        scheduled: The runs with schedules.
        target: The accuracy to reach.
        spread: Spread of single runs with schedules, None to take it from them.
    """
    lengths = [row["epochs"] for row in scheduled]
    own = crossing(lengths, [row["top1"] for row in scheduled], Target(target), spread=spread)
    low, high = min(lengths), max(lengths)
    each = []
    for row in (row for row in rows if row["final"]):
        points = [(e, top1) for e, top1 in row["average"] if low - 0.1 <= e <= high + 0.1]
        each.append(crossing(*zip(*points, strict=True), Target(target)).epochs)
    constant = geometric_mean(each, low, high)
    return own, constant, ratio(constant, own)


def geometric_mean(epochs: list[float], shortest: float, longest: float) -> Crossing:
    """Return the geometric mean of crossings with its interval.

    Args:
        epochs: The crossings, 0 or infinite where they are not within the lengths looked at.
        shortest: The shortest of these lengths.
        longest: The longest.
    """
    if math.inf in epochs:
        return Crossing(math.inf, 0.0, math.inf)
    if 0 in epochs:
        return Crossing(0.0, 0.0, math.inf)
    logarithms = [math.log(value) for value in epochs]
    spread = Spread.of([logarithms])
    half = spread.half(len(logarithms)) if spread else math.inf
    middle = statistics.mean(logarithms)
    low, high = math.exp(middle - half), math.exp(min(middle + half, 700))
    return Crossing(
        math.exp(middle), low if low >= shortest else 0.0, high if high <= longest else math.inf
    )


def verdict(own: Crossing, constant: Crossing, times: Crossing, target: float) -> str:
    """Say whether the two ways agree."""
    if times.low >= 1 / LIMIT and times.high <= LIMIT:
        goal = "met"
    elif times.low > LIMIT or times.high < 1 / LIMIT:
        goal = "missed"
    else:
        goal = "undecided"
    return (
        f"Epochs to {target:.1f} %: {interval(own, 1)} with schedules, {interval(constant, 1)} at "
        f"a constant rate, {interval(times, unit='×')}. Goal, within 10 %: {goal}.\n"
    )


def tables(rows: Rows, scheduled: Rows) -> str:
    """Tabulate the trials, and the accuracy by length."""
    trials = [row for row in rows if not row["final"]]
    lines = ["| constant rate | top-1 % of the average on held-out images | of the last weights |"]
    lines.append("|---:|---:|---:|")
    for row in sorted(trials, key=lambda row: -row["lr"]):
        lines.append(f"| {row['lr']:g} | {row['average'][-1][1]:.2f} | {row['top1']:.2f} |")
    lines += ["", "| epochs | top-1 % with schedules | seeds | at a constant rate | seeds |"]
    lines.append("|---:|---:|---:|---:|---:|")
    ours: dict[float, list[float]] = {}
    theirs: dict[float, list[float]] = {}
    for epochs, top1 in (point for row in rows if row["final"] for point in row["average"]):
        ours.setdefault(round(epochs, 1), []).append(top1)
    for row in scheduled:
        theirs.setdefault(row["epochs"], []).append(row["top1"])
    for epochs in sorted({*ours, *theirs}):
        cells = [
            f"{mean_and_spread(values)} | {len(values)}" if (values := found.get(epochs)) else " | "
            for found in (theirs, ours)
        ]
        lines.append(f"| {epochs:g} | {cells[0]} | {cells[1]} |")
    lines += ["", "Values after ± are standard deviations."]
    return "\n".join(lines) + "\n"


def mean_and_spread(values: list[float]) -> str:
    """The mean, and the standard deviation where there are several."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def draw(rows: Rows, scheduled: Rows, target: float, path: Path) -> None:
    """Plot accuracy against epochs for both ways."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for row in (row for row in rows if row["final"]):
        label = "constant rate, averaged weights" if row["seed"] == SEEDS[0] else None
        axes.plot(*zip(*row["average"], strict=True), color="tab:blue", alpha=0.7, label=label)
    lengths = [row["epochs"] for row in scheduled]
    own = [row["top1"] for row in scheduled]
    axes.scatter(lengths, own, color="tab:orange", zorder=3, label="schedules of their own length")
    axes.axhline(target, color="gray", linestyle=":", label=f"target, {target:.1f} %")
    axes.set_ylim(bottom=min(own) - 4)
    axes.set_xlabel("epochs")
    axes.set_ylabel("top-1 accuracy on the test set, %")
    axes.set_title("CIFAR-10 at 256, SGD with Nesterov momentum")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__).parse_args()
    results = grid.Results(grid.RESULT)
    search = search_of(results.searches, *TARGET_CELL)
    target = target_of(results.runs, grid.EPOCHS)
    if search is None or target is None:
        raise SystemExit(f"{grid.RESULT.name} lacks the cell; valid: after epochs_to_target.py")
    best = search["best"]
    trials = [run(best, part, epochs=TRIED, seed=0, final=False) for part in FRACTIONS]
    rows = run_missing(RESULT, __doc__ or "", trials, options.data, options.workers, curve)
    part = chosen(rows) / best["lr"]
    final = [run(best, part, epochs=TRAINED, seed=seed, final=True) for seed in SEEDS]
    rows = run_missing(RESULT, __doc__ or "", final, options.data, options.workers, curve)
    scheduled = finals(results.runs, *TARGET_CELL)
    spreads = spreads_of(results.runs)
    found = compare(rows, scheduled, target, spreads and spreads[TARGET_CELL])
    text = verdict(*found, target)
    text += "\n" + tables(rows, scheduled) + "\n" + provenance(rows) + "\n"
    draw(rows, scheduled, target, RESULT.with_suffix(".png"))
    RESULT.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
