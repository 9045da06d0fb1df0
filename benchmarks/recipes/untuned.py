"""Claim: what epochs_to_target.py does not tune explains part of the differences between the
optimizers: LARS ends higher with Nesterov momentum, SGD and LARS each with the weight decay of the
other, and Muon with a lower learning rate of biases.

    largebatch data prepare cifar10 --archive FILE --out data/cifar10
    python -m benchmarks.recipes.untuned --data data/cifar10

In the grid SGD and Muon have Nesterov momentum and LARS does not, as You et al. 2017 have it. Muon
trains biases with airbench's learning rate at each batch, 64 times that of the other weights that
it does not orthogonalise; SGD has cells with and without the factor. SGD has airbench94's weight
decay, 1.3e-3, and LARS the 5e-4 that is usual for it. Here the setting that the search of a cell
chose is trained with one change, with two of the same seeds, and evaluated on the test set once.
Nothing else is tuned again after the change, so that no gain here does not exclude one.

Finished runs are written to benchmarks/results/untuned.json and are not repeated: a run takes 7 to
15 minutes on one core.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.airbench_optimizers import RECIPE, name_of
from benchmarks.recipes import epochs_to_target as grid
from benchmarks.recipes.epochs_to_target_estimates import cells_of, finals, groups_of, search_of
from benchmarks.recipes.large_batch_single import Rows, Single, parser, provenance, run_missing
from benchmarks.recipes.spread import Spreads, difference
from benchmarks.tables import RESULTS

RESULT = RESULTS / "untuned.json"

SEEDS = (0, 1)
#: The optimizers of the grid that each change is compared with.
OTHERS = ("Nesterov-1x", "LARS", "Muon")


@dataclass(frozen=True)
class Change:
    """A cell of the grid, and what is changed of its setting.

    Attributes:
        optimizer: A key of ``OPTIMIZERS``.
        batch_size: Global batch size in images.
        override: Override of the recipe.
    """

    optimizer: str
    batch_size: int
    override: str

    def run(self, best: dict[str, Any], seed: int) -> Single:
        """Return its run with a seed.

        Args:
            best: What the search of the cell chose.
            seed: The seed.
        """
        run = grid.Run(self.optimizer, self.batch_size, grid.EPOCHS, seed)
        overrides = [*run.overrides(best), self.override]
        return Single(RECIPE, overrides, {**asdict(self), "seed": seed})


CHANGES = (
    Change("LARS", 256, "optimizer.nesterov=true"),
    Change("LARS", 2560, "optimizer.nesterov=true"),
    Change("Nesterov-1x", 2560, "optimizer.weight_decay=5e-4"),
    Change("LARS", 2560, "optimizer.weight_decay=1.3e-3"),
    Change("Muon", 256, "optimizer.bias_lr_scale=1"),
    Change("Muon", 8192, "optimizer.bias_lr_scale=8"),
)


def table(rows: Rows, runs: Rows) -> str:
    """Compare each change with its cell, and with other optimizers at the same batch.

    Args:
        rows: The runs of this benchmark.
        runs: The runs of epochs_to_target.py.
    """
    found = {
        change: [row["top1"] for row in rows if asdict(change).items() <= row.items()]
        for change in CHANGES
    }
    groups: dict[Any, list[list[float]]] = {c: groups_of(runs, *c) for c in cells_of(runs)}
    spreads = Spreads.of(groups | {change: [top1] for change, top1 in found.items()})

    def of_grid(optimizer: str, batch_size: int) -> list[float]:
        return [row["top1"] for row in finals(runs, optimizer, batch_size, grid.EPOCHS)]

    lines = [
        f"Top-1 % on the test set after {grid.EPOCHS} epochs, with 95 % intervals. The spread is "
        "pooled with that of all cells of the grid.",
        "",
        "| optimizer | batch | changed | top-1 % | minus without the change "
        f"| {' | '.join(f'{name_of(other)} minus this' for other in OTHERS)} "
        f"| seeds of this, without, {', '.join(map(name_of, OTHERS))} |",
        f"|---|---:|---|---:|---:|{'---:|' * len(OTHERS)}---:|",
    ]
    for change, mine in found.items():
        cell = (change.optimizer, change.batch_size)
        own = of_grid(*cell)
        seeds, leads = [len(mine), len(own)], []
        for other in OTHERS:
            theirs = of_grid(other, change.batch_size)
            seeds.append(len(theirs))
            spread = spreads[other, change.batch_size]
            same = other == change.optimizer
            leads.append("" if same else difference(theirs, spread, mine, spreads[change]))
        half = spreads[change].half(len(mine))
        lines.append(
            f"| {name_of(change.optimizer)} | {change.batch_size:,} | `{change.override}` "
            f"| {statistics.mean(mine):.2f} ± {half:.2f} "
            f"| {difference(mine, spreads[change], own, spreads[cell])} "
            f"| {' | '.join(leads)} | {', '.join(map(str, seeds))} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parser(__doc__).parse_args()
    content = json.loads(grid.RESULT.read_text())
    wanted = []
    for change in CHANGES:
        search = search_of(content["searches"], change.optimizer, change.batch_size)
        assert search
        wanted += [change.run(search["best"], seed) for seed in SEEDS]
    rows = run_missing(RESULT, __doc__ or "", wanted, options.data, options.workers)
    text = table(rows, content["runs"]) + "\n" + provenance(rows) + "\n"
    RESULT.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
