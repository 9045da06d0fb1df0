"""What the tuning of large_batch.py starts from."""

from __future__ import annotations

BATCHES = (256, 1024, 2560, 4096, 8192)

#: Learning rates at the smallest batch, and epochs of warm-up for all.
GUESSES = {"lars": 0.8, "nesterov": 0.2}
WARMUP_EPOCHS = 3


def starts(optimizer: str, batch_size: int) -> list[tuple[float, int]]:
    """The first trials of a cell: learning rate and epochs of warm-up.

    Linear scaling, square-root scaling, and their geometric mean; at the smallest batch the guess,
    half and double.
    """
    smallest = min(BATCHES)
    if batch_size == smallest:
        factors = [1.0, 0.5, 2.0]
    else:
        factors = [(batch_size / smallest) ** power for power in (1, 0.5, 0.75)]
    return [(written(factor * GUESSES[optimizer]), WARMUP_EPOCHS) for factor in factors]


def written(lr: float) -> float:
    """A learning rate as one would write it."""
    return float(f"{lr:.3g}")
