"""Claim: in the cells of epochs_to_target.py, a setting that won the search at a neighbouring batch
is not better, with a rate for the cell's batch, than the one that the cell's own search chose.

    largebatch data prepare cifar10 --archive FILE --out data/cifar10
    python -m benchmarks.recipes.search_rivals --data data/cifar10

A search trains two or three settings at full length, one run each, and chooses them by short runs.
How far its luck goes is not in the interval of any cell. All searches of an optimizer try the same
values of warm-up, power and momentum, with rates that grow with the batch, so that the winner of a
neighbour was tried in the cell too, perhaps for an epoch only. It is trained here as the cell's own
setting was, for as many epochs and with two of the same seeds, and evaluated on the test set once.

Finished runs are written to benchmarks/results/search_rivals.json and are not repeated: a run takes
7 to 15 minutes on one core.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.airbench_optimizers import RECIPE, name_of
from benchmarks.recipes import epochs_to_target as grid
from benchmarks.recipes.epochs_to_target_estimates import cells_of, finals, groups_of, search_of
from benchmarks.recipes.large_batch_single import Rows, Single, parser, provenance, run_missing
from benchmarks.recipes.spread import Spreads, difference
from benchmarks.tables import RESULTS

RESULT = RESULTS / "search_rivals.json"

#: The cells (optimizer, batch size) whose rivals are trained, which reach the target and have one,
#: and the epochs: those of the searches, or fewer where these reach more than the target.
CELLS = {
    ("Muon", 1024): 10.24,
    ("Muon", 2560): grid.EPOCHS,
    ("Nesterov", 2560): grid.EPOCHS,
    ("LARS", 256): grid.EPOCHS,
    ("LARS", 2560): grid.EPOCHS,
    ("Muon", 4096): grid.EPOCHS,
}
SEEDS = (0, 1)
#: Batch sizes whose winners are rivals at the next smaller and larger one.
NEIGHBOURS = (256, 2560, 4096, 8192)
#: What a search tries beside the rate.
SHAPE = ("warmup", "power", "momentum")


@dataclass(frozen=True)
class Rival:
    """A setting that won the search of a neighbouring batch size.

    Attributes:
        optimizer: A key of ``OPTIMIZERS``.
        batch_size: The batch size at which it is trained here.
        epochs: The epochs that it is trained for here.
        won_at: The neighbour.
        lr: Its rate in this cell's search.
        warmup: Warm-up as a share of the run.
        power: Power of the decay.
        momentum: Momentum.
        tried: Epochs that this cell's search trained it at most.
    """

    optimizer: str
    batch_size: int
    epochs: float
    won_at: int
    lr: float
    warmup: float
    power: float
    momentum: float
    tried: float

    def run(self, seed: int) -> Single:
        """Return its run with a seed."""
        tuned = {key: getattr(self, key) for key in ("lr", *SHAPE)}
        run = grid.Run(self.optimizer, self.batch_size, self.epochs, seed)
        return Single(RECIPE, run.overrides(tuned), {**vars(run), **tuned})


def shape(setting: dict[str, Any]) -> tuple[float, ...]:
    """Return warm-up, power and momentum; a warm-up of whole steps differs a little by batch."""
    return tuple(round(float(setting[key]), 1 if key == "warmup" else 2) for key in SHAPE)


def rivals_of(
    searches: Rows, optimizer: str, batch_size: int, epochs: float = grid.EPOCHS
) -> list[Rival]:
    """Return the settings that won at the next smaller and larger neighbour, but not here.

    Args:
        searches: The finished searches.
        optimizer: A key of ``OPTIMIZERS``.
        batch_size: Batch size of the cell, whose search has finished.
        epochs: The epochs that they are to be trained for.
    """
    here = search_of(searches, optimizer, batch_size)
    assert here
    smaller = [batch for batch in NEIGHBOURS if batch < batch_size]
    larger = [batch for batch in NEIGHBOURS if batch > batch_size]
    found: list[Rival] = []
    for neighbour in (*smaller[-1:], *larger[:1]):
        other = search_of(searches, optimizer, neighbour)
        if other is None:
            continue
        if shape(other["best"]) in {shape(here["best"]), *(shape(vars(r)) for r in found)}:
            continue
        same = [t for t in here["trials"] if shape(t) == shape(other["best"])]
        if not same:
            continue  # its search did not get as far
        longest = max(same, key=lambda trial: (trial["epochs"], trial["top1"]))
        values = {key: longest[key] for key in ("lr", *SHAPE)}
        tried = round(longest["epochs"], 1)
        found.append(Rival(optimizer, batch_size, epochs, neighbour, **values, tried=tried))
    return found


def table(rivals: list[Rival], rows: Rows, runs: Rows) -> str:
    """Tabulate each rival against the setting of its cell, at the same length.

    Args:
        rivals: All rivals, trained or not.
        rows: Their runs.
        runs: The runs of epochs_to_target.py.
    """

    def of(rival: Rival) -> list[float]:
        wanted = rival.run(0).identity.items() - {("seed", 0)}
        return [row["top1"] for row in rows if wanted <= row.items()]

    groups: dict[Any, list[list[float]]] = {c: groups_of(runs, *c) for c in cells_of(runs)}
    spreads = Spreads.of(groups | {rival: [of(rival)] for rival in rivals})
    lines = [
        "Top-1 % on the test set. The spread is pooled with that of all cells. Values after ± are "
        "95 % intervals.",
        "",
        "| optimizer | batch | epochs | won the search at | epochs in this cell's search "
        "| learning rate | top-1 % | of the chosen setting | difference | seeds of each |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for rival in rivals:
        cell = (rival.optimizer, rival.batch_size)
        start = f"| {name_of(rival.optimizer)} | {rival.batch_size:,} | {rival.epochs:g} "
        start += f"| {rival.won_at:,} | {rival.tried:g} | {rival.lr:g} "
        here, there = of(rival), [row["top1"] for row in finals(runs, *cell, rival.epochs)]
        if len(here) < len(SEEDS) or not there:
            lines.append(f"{start}| not trained | | | |")
            continue
        lines.append(
            f"{start}| {statistics.mean(here):.2f} | {statistics.mean(there):.2f} "
            f"| {difference(here, spreads[rival], there, spreads[cell])} "
            f"| {len(here)} and {len(there)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parser(__doc__).parse_args()
    content = json.loads(grid.RESULT.read_text())
    searches, runs = content["searches"], content["runs"]
    rivals = [
        rival
        for cell, epochs in CELLS.items()
        if search_of(searches, *cell)
        for rival in rivals_of(searches, *cell, epochs)
    ]
    wanted = [rival.run(seed) for rival in rivals for seed in SEEDS]
    rows = run_missing(RESULT, __doc__ or "", wanted, options.data, options.workers)
    text = table(rivals, rows, runs) + "\n" + provenance(rows) + "\n"
    RESULT.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
