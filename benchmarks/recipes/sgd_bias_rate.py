"""Claim: that LARS ends far above SGD with Nesterov momentum at a batch of 8,192 comes from SGD's
rate of biases, which airbench sets to 64 times that of the other weights.

    largebatch data prepare cifar10 --archive FILE --out data/cifar10
    python -m benchmarks.recipes.sgd_bias_rate --data data/cifar10

In the grid of epochs_to_target.py, the biases of SGD have airbench's rate at each batch and those
of LARS the rate of the other weights; neither is tuned. The search of SGD at 8,192 chose the lowest
learning rate that it tried. Here the settings that came furthest in that search are trained again
with the biases at the same rate as the other weights, and at larger rates. They are compared on
5,000 held-out training images, one run each. The best is then trained on all training images with
two seeds and evaluated on the test set, as the grid's own settings were.

Finished runs are written to benchmarks/results/sgd_bias_rate.json and are not repeated: a run takes
7 to 15 minutes on one core.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass

from benchmarks.airbench_optimizers import RECIPE
from benchmarks.recipes import epochs_to_target as grid
from benchmarks.recipes.epochs_to_target_estimates import cells_of, finals, groups_of
from benchmarks.recipes.large_batch_single import Rows, Single, parser, provenance, run_missing
from benchmarks.recipes.large_batch_starts import HELD_OUT
from benchmarks.recipes.spread import Spreads, difference
from benchmarks.tables import RESULTS

RESULT = RESULTS / "sgd_bias_rate.json"

OPTIMIZER, BATCH_SIZE = "Nesterov", 8192
#: Of the biases, over that of the other weights.
BIAS_LR_SCALE = 1
SEEDS = (0, 1)


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        lr: Learning rate.
        warmup: Warm-up as a share of the run.
        power: Power of the decay.
        momentum: Momentum.
    """

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
        run = grid.Run(OPTIMIZER, BATCH_SIZE, grid.EPOCHS, seed)
        overrides = [*run.overrides(asdict(self)), f"optimizer.bias_lr_scale={BIAS_LR_SCALE}"]
        if held_out:
            overrides.append(f"data.holdout={held_out}")
        return Single(RECIPE, overrides, {**asdict(self), "held_out": held_out, "seed": seed})


#: Warm-up, power and momentum of the search's winner, and of the best of its short runs.
WINNER, BEST_SHORT = (0.32, 1.62, 0.944), (0.057, 1.0, 0.85)
SETTINGS = (
    Setting(0.521, *WINNER),
    Setting(1.5, *WINNER),
    Setting(2.12, *BEST_SHORT),
    Setting(4.2, *WINNER),
    Setting(5.87, *BEST_SHORT),
)


def top1_of(rows: Rows, setting: Setting, held_out: int) -> list[float]:
    """Return the accuracies of a setting in percent."""
    wanted = {**asdict(setting), "held_out": held_out}.items()
    return [row["top1"] for row in rows if wanted <= row.items()]


def best_of(rows: Rows) -> Setting:
    """Return the setting that is best on the held-out images; all must have been trained."""
    return max(SETTINGS, key=lambda setting: top1_of(rows, setting, HELD_OUT)[0])


def tables(rows: Rows, runs: Rows) -> str:
    """Tabulate the settings, and compare the best with what the grid has at this batch.

    Args:
        rows: The runs of this benchmark, those of the best setting on the test set included.
        runs: The runs of epochs_to_target.py.
    """
    lines = [
        f"After {grid.EPOCHS} epochs on {HELD_OUT:,} held-out images, biases at {BIAS_LR_SCALE} "
        "times the rate of the other weights, one run each.",
        "",
        "| learning rate | warm-up, part of the run | power | momentum | top-1 % |",
        "|---:|---:|---:|---:|---:|",
    ]
    for setting in SETTINGS:
        (top1,) = top1_of(rows, setting, HELD_OUT)
        values = f"{setting.lr:g} | {setting.warmup:g} | {setting.power:g} | {setting.momentum:g}"
        lines.append(f"| {values} | {top1:.2f} |")
    found = top1_of(rows, best_of(rows), 0)
    groups = {cell: groups_of(runs, *cell) for cell in cells_of(runs)}
    spreads = Spreads.of({**groups, "here": [found]})
    lines += [
        "",
        f"After {grid.EPOCHS} epochs on the test set, with 95 % intervals.",
        "",
        "| | top-1 % | SGD with its biases at the rate of the other weights, minus it | seeds |",
        "|---|---:|---:|---:|",
        f"| SGD, biases at {BIAS_LR_SCALE} times the rate | {statistics.mean(found):.2f} "
        f"± {spreads['here'].half(len(found)):.2f} | | {len(found)} |",
    ]
    for name, optimizer in (("SGD, biases at 64 times the rate", OPTIMIZER), ("LARS", "LARS")):
        cell = (optimizer, BATCH_SIZE)
        top1 = [row["top1"] for row in finals(runs, *cell, grid.EPOCHS)]
        lines.append(
            f"| {name} | {statistics.mean(top1):.2f} ± {spreads[cell].half(len(top1)):.2f} "
            f"| {difference(found, spreads['here'], top1, spreads[cell])} | {len(top1)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parser(__doc__).parse_args()

    def trained(runs: list[Single]) -> Rows:
        return run_missing(RESULT, __doc__ or "", runs, options.data, options.workers)

    rows = trained([setting.run(0, HELD_OUT) for setting in SETTINGS])
    rows = trained([best_of(rows).run(seed) for seed in SEEDS])
    runs = json.loads(grid.RESULT.read_text())["runs"]
    text = tables(rows, runs) + "\n" + provenance(rows) + "\n"
    RESULT.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
