"""Claim: airbench's learning rate of biases, 64 times that of the other weights, is too high at a
batch of 8,192. With a lower one, SGD with Nesterov momentum and Muon end higher there.

    largebatch data prepare cifar10 --archive FILE --out data/cifar10
    python -m benchmarks.recipes.bias_rate --data data/cifar10

In the grid of epochs_to_target.py the biases of SGD and Muon have airbench's rate at each batch,
and those of LARS the rate of the other weights; neither is tuned. Here settings that came far in
the searches of SGD and Muon at 8,192 are trained again with lower rates of biases. They are
compared on 5,000 held-out training images, one run each. The best of each optimizer is then trained
on all training images with two seeds and evaluated on the test set, as the grid's own settings
were.

Finished runs are written to benchmarks/results/bias_rate.json and are not repeated: a run takes 7
to 15 minutes on one core.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.airbench_optimizers import RECIPE
from benchmarks.recipes import epochs_to_target as grid
from benchmarks.recipes.epochs_to_target_estimates import cells_of, finals, groups_of, search_of
from benchmarks.recipes.epochs_to_target_report import NAMES
from benchmarks.recipes.large_batch_single import Rows, Single, parser, provenance, run_missing
from benchmarks.recipes.large_batch_starts import HELD_OUT
from benchmarks.recipes.spread import Spreads, difference
from benchmarks.tables import RESULTS

RESULT = RESULTS / "bias_rate.json"

BATCH_SIZE = 8192
#: Of the grid: the learning rate of biases over that of the other weights.
GRID_SCALE = 64
SEEDS = (0, 1)


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        optimizer: A key of ``OPTIMIZERS``.
        bias_lr_scale: Learning rate of biases over that of the other weights; for Muon over that of
            the weights that are not orthogonalised.
        lr: Learning rate.
        warmup: Warm-up as a share of the run.
        power: Power of the decay.
        momentum: Momentum.
    """

    optimizer: str
    bias_lr_scale: float
    lr: float
    warmup: float
    power: float
    momentum: float

    def run(self, seed: int, held_out: int = 0) -> Single:
        """Return its run with a seed.

        Args:
            seed: The seed.
            held_out: Training images that are left out and evaluated in place of the test set.
        """
        run = grid.Run(self.optimizer, BATCH_SIZE, grid.EPOCHS, seed)
        overrides = run.overrides(asdict(self))
        overrides.append(f"optimizer.bias_lr_scale={self.bias_lr_scale:g}")
        if held_out:
            overrides.append(f"data.holdout={held_out}")
        return Single(RECIPE, overrides, {**asdict(self), "held_out": held_out, "seed": seed})


#: Warm-up, power and momentum of what the search of SGD chose, and of the best of its short runs.
_CHOSEN, _BEST_SHORT = (0.32, 1.62, 0.944), (0.057, 1.0, 0.85)
SETTINGS = (
    Setting("Nesterov", 1, 0.521, *_CHOSEN),
    Setting("Nesterov", 1, 1.5, *_CHOSEN),
    Setting("Nesterov", 1, 2.12, *_BEST_SHORT),
    Setting("Nesterov", 1, 4.2, *_CHOSEN),
    Setting("Nesterov", 1, 5.87, *_BEST_SHORT),
    Setting("Muon", 8, 0.256, 0.14, 0.646, 0.899),  # what its search chose
    Setting("Muon", 1, 0.256, 0.14, 0.646, 0.899),
)
COMPARED = {"Nesterov": ("Nesterov", "LARS", "Muon"), "Muon": ("Muon",)}


def top1_of(rows: Rows, setting: Setting, held_out: int) -> list[float]:
    """Return the accuracies of a setting in percent."""
    wanted = {**asdict(setting), "held_out": held_out}.items()
    return [row["top1"] for row in rows if wanted <= row.items()]


def best_of(rows: Rows, optimizer: str) -> Setting:
    """Return the setting of an optimizer that is best on the held-out images."""
    mine = [setting for setting in SETTINGS if setting.optimizer == optimizer]
    return max(mine, key=lambda setting: top1_of(rows, setting, HELD_OUT)[0])


def held_out_table(rows: Rows, searches: Rows) -> str:
    """Tabulate the settings and, of each optimizer, what its search chose.

    Args:
        rows: The runs of this benchmark.
        searches: The searches of epochs_to_target.py.
    """
    lines = [
        f"After {grid.EPOCHS} epochs on {HELD_OUT:,} held-out images, one run each.",
        "",
        "| optimizer | learning rate of biases, times | learning rate | warm-up, part of the run "
        "| power | momentum | top-1 % |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]

    def line(optimizer: str, scale: float, values: dict[str, Any], top1: float) -> str:
        numbers = " | ".join(f"{values[key]:.3g}" for key in ("lr", "warmup", "power", "momentum"))
        return f"| {NAMES.get(optimizer, optimizer)} | {scale:g} | {numbers} | {top1:.2f} |"

    for optimizer in COMPARED:
        search = search_of(searches, optimizer, BATCH_SIZE)
        assert search
        lines.append(line(optimizer, GRID_SCALE, search["best"], search["best"]["top1"]))
        for setting in (s for s in SETTINGS if s.optimizer == optimizer):
            (top1,) = top1_of(rows, setting, HELD_OUT)
            lines.append(line(optimizer, setting.bias_lr_scale, asdict(setting), top1))
    return "\n".join(lines) + "\n"


def final_table(rows: Rows, runs: Rows) -> str:
    """Compare the best of each optimizer with what the grid has at this batch.

    Args:
        rows: The runs of this benchmark.
        runs: The runs of epochs_to_target.py.
    """
    best = {optimizer: best_of(rows, optimizer) for optimizer in COMPARED}
    found = {optimizer: top1_of(rows, setting, 0) for optimizer, setting in best.items()}
    groups: dict[Hashable, list[list[float]]] = {c: groups_of(runs, *c) for c in cells_of(runs)}
    spreads = Spreads.of({**groups, **{name: [top1] for name, top1 in found.items()}})
    lines = [
        f"After {grid.EPOCHS} epochs on the test set, with 95 % intervals.",
        "",
        "| | learning rate of biases, times | top-1 % | minus | | seeds of each |",
        "|---|---:|---:|---|---:|---:|",
    ]
    for optimizer, others in COMPARED.items():
        mine = found[optimizer]
        mean = f"{statistics.mean(mine):.2f} ± {spreads[optimizer].half(len(mine)):.2f}"
        for other in others:
            cell = (other, BATCH_SIZE)
            theirs = [row["top1"] for row in finals(runs, *cell, grid.EPOCHS)]
            lines.append(
                f"| {NAMES.get(optimizer, optimizer)} | {best[optimizer].bias_lr_scale:g} | {mean} "
                f"| {NAMES.get(other, other)} of the grid, {statistics.mean(theirs):.2f} "
                f"| {difference(mine, spreads[optimizer], theirs, spreads[cell])} "
                f"| {len(mine)} and {len(theirs)} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parser(__doc__).parse_args()

    def trained(runs: list[Single]) -> Rows:
        return run_missing(RESULT, __doc__ or "", runs, options.data, options.workers)

    rows = trained([setting.run(0, HELD_OUT) for setting in SETTINGS])
    rows = trained([best_of(rows, name).run(seed) for name in COMPARED for seed in SEEDS])
    content = json.loads(grid.RESULT.read_text())
    parts = [held_out_table(rows, content["searches"]), final_table(rows, content["runs"])]
    text = "\n".join([*parts, provenance(rows) + "\n"])
    RESULT.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
