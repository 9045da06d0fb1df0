"""What large_batch.py tunes, and the values from which it starts."""

from __future__ import annotations

BATCHES = (256, 1024, 2560, 4096, 8192)

#: The recipe whose values are overridden, by optimizer.
RECIPES = {
    "lars": "cifar10-b256",
    "nesterov": "cifar10-nesterov-b256",
    "muon": "cifar10-muon-b256",
}
HELD_OUT = 5000  # training images that score the trials

#: Learning rates at the smallest batch, and the number of warm-up epochs at every batch.
GUESSES = {"lars": 0.8, "nesterov": 0.2, "muon": 0.08}
WARMUP_EPOCHS = 3


def starts(optimizer: str, batch_size: int) -> list[tuple[float, int]]:
    """Return the first trials of a cell as pairs of learning rate and number of warm-up epochs.

    The learning rates follow linear scaling, square-root scaling and their geometric mean. At the
    smallest batch they are the guess, half of it and double of it.
    """
    smallest = min(BATCHES)
    if batch_size == smallest:
        factors = [1.0, 0.5, 2.0]
    else:
        factors = [(batch_size / smallest) ** power for power in (1, 0.5, 0.75)]
    return [(rounded(factor * GUESSES[optimizer]), WARMUP_EPOCHS) for factor in factors]


def rounded(lr: float) -> float:
    """Round a learning rate to three significant digits."""
    return float(f"{lr:.3g}")
