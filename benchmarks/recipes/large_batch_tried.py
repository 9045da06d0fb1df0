"""Claim: at 4,096 and 8,192, what single changes on top of the tuned runs of large_batch.py do.

    python -m benchmarks.recipes.large_batch_tried --data data/cifar10

Each change is run once with the first seed and scored on 5,000 training images that are held out
of training, with the learning rate and warm-up that were tuned for the optimizer without the
change. Runs that are in the results already are not repeated.
"""

from __future__ import annotations

from itertools import chain

from benchmarks.recipes import large_batch
from benchmarks.recipes.large_batch import Run
from benchmarks.recipes.large_batch_report import NAMES, best_of, trials
from benchmarks.recipes.large_batch_single import (
    Rows,
    Single,
    find,
    parser,
    provenance,
    run_missing,
)
from benchmarks.recipes.large_batch_starts import RECIPES

RESULTS = large_batch.RESULTS.with_name("large_batch_tried.json")

#: The optimizers and the overrides of each change, by its name.
Changes = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
AT_4096: Changes = {
    "linear decay, not quadratic": (("lars", "nesterov"), ("schedule.power=1",)),
    "quadratic decay, not linear": (("muon",), ("schedule.power=2",)),
    "Nesterov momentum": (("lars",), ("optimizer.nesterov=true",)),
    "batch norm over 1,024, not 256": (("lars", "nesterov"), ("micro_batch_size=1024",)),
    "weight decay × 4": (("lars", "nesterov"), ("optimizer.weight_decay=2e-3",)),
    "learning rate outside the momentum": (("lars",), ("optimizer.dialect=torch",)),
    "30 epochs, not 20": (("lars", "nesterov"), ("epochs=30",)),
}
#: No trial of SGD at 8,192 had a warm-up longer than 3 epochs, which are only 18 updates.
AT_8192: Changes = {
    "learning rate 1.6 after 8 epochs": (
        ("nesterov",),
        ("optimizer.lr=1.6", "schedule.warmup=8ep"),
    ),
}
CHANGES = {4096: AT_4096, 8192: AT_8192}


def runs(batch_size: int) -> list[Single]:
    """Return the runs that apply each change to the best trial of its optimizer, if it has any."""
    rows = large_batch.Runs(large_batch.RESULTS).rows
    wanted = []
    for change, (optimizers, overrides) in CHANGES[batch_size].items():
        for optimizer in optimizers:
            tried = trials(rows, optimizer, batch_size)
            if not tried:
                continue
            best = best_of(tried)
            run = Run("trial", optimizer, batch_size, best["lr"], best["warmup_epochs"])
            identity = {"change": change, **vars(run)}
            recipe = RECIPES[optimizer]
            wanted.append(Single(recipe, [*run.overrides(), *overrides], identity))
    return wanted


def table(rows: Rows, batch_size: int) -> str:
    """Tabulate the accuracy with each change and the difference from the run without it."""
    grid = large_batch.Runs(large_batch.RESULTS).rows
    changed = {run.identity["optimizer"] for run in runs(batch_size)}
    names = {optimizer: name for optimizer, name in NAMES.items() if optimizer in changed}
    best = {optimizer: best_of(trials(grid, optimizer, batch_size))["top1"] for optimizer in names}
    lines = [
        f"| held-out top-1 % at {batch_size:,} | " + " | ".join(names.values()) + " |",
        "|---|" + "---:|" * len(names),
        "| as tuned | " + " | ".join(f"{best[optimizer]:.2f}" for optimizer in names) + " |",
    ]
    results = {
        (run.identity["change"], run.identity["optimizer"]): find(rows, run.identity)
        for run in runs(batch_size)
    }
    for change in CHANGES[batch_size]:
        found = {optimizer: results.get((change, optimizer)) for optimizer in names}
        cells = [
            f"{row['top1']:.2f} ({row['top1'] - best[optimizer]:+.2f})" if row else ""
            for optimizer, row in found.items()
        ]
        if any(cells):
            lines.append(f"| {change} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options_of = parser(__doc__)
    changes = [*AT_4096, *AT_8192]
    options_of.add_argument("--only", nargs="+", metavar="CHANGE", choices=changes, default=changes)
    options = options_of.parse_args()
    everything = chain.from_iterable(map(runs, CHANGES))
    wanted = [run for run in everything if run.identity["change"] in options.only]
    rows = run_missing(RESULTS, __doc__ or "", wanted, options.data, options.workers)
    text = (
        "\n".join([*(table(rows, batch_size) for batch_size in CHANGES), provenance(rows)]) + "\n"
    )
    RESULTS.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
