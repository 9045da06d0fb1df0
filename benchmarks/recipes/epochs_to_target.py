"""Claim: on CIFAR-10, ten times the batch, 2,560 for 256, takes about 1.2 times the epochs to 86 %
with Muon, and 1.4 to 1.5 times with LARS or SGD.

    python -m benchmarks.recipes.epochs_to_target

It prints the first tables of benchmarks/results/epochs_to_target.md and README's line, and draws
the plots. The searches and runs, and the other tables of the stored result, were made by the script
of this name in commit fbc1dde, which goes on from the stored ones.

In each cell, an optimizer at a batch size, `largebatch tune lr` searched learning rate, warm-up,
power of the decay and momentum at one length, with the same budget of epochs, scored on training
images that were held out. The tuned values were trained on all training images at lengths on both
sides of the target; each run has a schedule of its own and was evaluated on the test set once, at
its end. The target is the mean of the first seeds of SGD at 256, with airbench's learning rate of
biases.
"""

from __future__ import annotations

import json
import math

from benchmarks import tables
from benchmarks.recipes.crossing import Crossing, interval, ratio
from benchmarks.recipes.epochs_to_target_estimates import (
    HEADLINE,
    IMAGES,
    SMALL,
    TEN_TIMES,
    Rows,
    cells_of,
    crossings,
    finals,
    name_of,
    never_reached,
    price_of,
    target_of,
)
from benchmarks.recipes.epochs_to_target_plot import draw, draw_ten_times

#: How many times the epochs at the small batch a larger one may take with the best optimizer.
GOALS = {2560: 1.1, 4096: 1.5, 8192: 2.0}
RESULT = tables.RESULTS / "epochs_to_target.json"


def overview(runs: Rows, target: float) -> str:
    """Tabulate the epochs to the target, a row for each batch and a column for each optimizer.

    At a larger batch, they are followed by what they are over those of the same optimizer at the
    small one. A cell whose interval is open at both ends has a "?".
    """
    found = crossings(runs, target)
    cells = [cell for cell in cells_of(runs) if cell[0] in HEADLINE]
    batches = sorted({batch_size for _, batch_size in cells})

    def cell(optimizer: str, batch_size: int) -> str:
        if (optimizer, batch_size) not in cells:
            return ""
        if never_reached(runs, optimizer, batch_size, target):
            longest = max(row["epochs"] for row in finals(runs, optimizer, batch_size))
            beyond, small = Crossing(math.inf, longest, math.inf), found.get((optimizer, SMALL))
            known = batch_size > SMALL and small and 0 < small.epochs < math.inf
            price = f"<br>{interval(ratio(beyond, small), unit='×')}" if small and known else ""
            return f"> {longest:g}{price}"
        epochs = found.get((optimizer, batch_size))
        if epochs is None or interval(epochs) == "?":
            return "?"
        price = price_of(found, optimizer, batch_size, optimizer)
        if price is None or batch_size == SMALL:
            return interval(epochs, 1)
        return f"{interval(epochs, 1)}<br>{interval(price, unit='×')}"

    optimizers = [name for name in HEADLINE if any(name == optimizer for optimizer, _ in cells)]
    columns = {"batch (updates per epoch)": "r", **{name_of(name): "r" for name in optimizers}}
    rows = [(f"{b:,} ({IMAGES / b:.3g})", *(cell(name, b) for name in optimizers)) for b in batches]
    return tables.table(columns, rows)


def goals(runs: Rows, target: float) -> str:
    """Tabulate the goals for Muon, which takes the fewest epochs at the small batch."""
    found, rows = crossings(runs, target), []
    for batch_size, most in GOALS.items():
        price = price_of(found, "Muon", batch_size, "Muon")
        assert price is not None
        verdict = "missed" if price.low > most else "met" if price.high <= most else "undecided"
        rows.append((f"{batch_size:,}", f"at most {most:g}", interval(price), verdict))
    columns = {
        "batch": "r",
        "goal: epochs over those at 256": "r",
        "measured (Muon)": "r",
        "verdict": "l",
    }
    return tables.table(columns, rows)


def ten_times(runs: Rows, target: float) -> str:
    """Say what ten times the batch takes, over the epochs of the same optimizer before."""
    found = crossings(runs, target)
    told = []
    for name in ("Muon", "LARS", "Nesterov-1x"):
        price = price_of(found, name, TEN_TIMES, name)
        assert price is not None, name
        told.append(f"{name_of(name)} {interval(price)}")
    return ", ".join(told)


def main() -> None:
    tables.parser(__doc__).parse_args()
    content = json.loads(RESULT.read_text())
    target = target_of(content["runs"], content["epochs"])
    draw(content["runs"], target, RESULT.with_suffix(".png"))
    draw_ten_times(content["runs"], target, RESULT.with_name("epochs_at_ten_times.png"))
    print(overview(content["runs"], target))
    print()
    print(goals(content["runs"], target))
    print()
    print(ten_times(content["runs"], target))


if __name__ == "__main__":
    main()
