"""Claim: LARS at a batch of 2,560 (19.5 updates per epoch) needs at most 1.6 times the epochs of a
batch of 256 to reach the same accuracy on CIFAR-10.

    largebatch data prepare cifar10 --archive FILE --out data/cifar10
    python -m benchmarks.recipes.batch_price --data data/cifar10

The target is the mean accuracy on the test set that LARS reaches at 256 in 20 epochs, with eight
seeds. At larger batches, LARS is trained for 26, 32 and 40 epochs with three seeds, each run with a
schedule of its own length. Runs of 20 epochs are those of large_batch.py's grid, where it has them.
Learning rate and warm-up, in epochs, are those tuned for 20 epochs, so that the price is one that
further tuning may lower. Each run is evaluated on the test set once, at its end.

Finished runs are written to benchmarks/results/batch_price.json and are not repeated: about 1.5
hours on two cores.
"""

from __future__ import annotations

from itertools import product

from benchmarks.recipes import large_batch
from benchmarks.recipes.batch_price_report import GRID_EPOCHS, SMALL, write
from benchmarks.recipes.large_batch_report import best_of, trials
from benchmarks.recipes.large_batch_single import Single, find, parser, run_missing
from benchmarks.recipes.large_batch_starts import RECIPES

RESULTS = large_batch.RESULTS.with_name("batch_price.json")

BATCHES = (2560, 4096)
EPOCHS = (26, 32, 40)
SEEDS = (0, 1, 2)
SEEDS_OF_TARGET = range(8)


def runs() -> list[Single]:
    """Return the runs that the grid does not have, with the grid's tuned values."""
    grid = large_batch.Runs(large_batch.RESULTS).rows
    longer = product(SEEDS, reversed(EPOCHS), BATCHES)
    of_target = product(SEEDS_OF_TARGET, [GRID_EPOCHS], [SMALL])
    wanted = []
    for seed, epochs, batch_size in [*longer, *of_target]:
        best = best_of(trials(grid, "lars", batch_size))
        run = large_batch.Run("final", "lars", batch_size, best["lr"], best["warmup_epochs"], seed)
        if epochs == GRID_EPOCHS and find(grid, vars(run)):
            continue
        identity = {**vars(run), "epochs": epochs}
        wanted.append(Single(RECIPES["lars"], [*run.overrides(), f"epochs={epochs}"], identity))
    return wanted


def main() -> None:
    options = parser(__doc__).parse_args()
    run_missing(RESULTS, __doc__ or "", runs(), options.data, options.workers)
    print(write(RESULTS, large_batch.Runs(large_batch.RESULTS).rows))


if __name__ == "__main__":
    main()
