"""Claim: at equal rates of the adapted weights (learning rate times trust coefficient), LARS at
batch 4,096 reaches more with a larger trust coefficient, as biases and norms take the rate itself.

    python -m benchmarks.recipes.large_batch_trust --data data/cifar10

Single trials of large_batch.py's recipe, scored on 5,000 training images that are held out of
training. Runs that are in the results already are not repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.recipes.large_batch_single import (
    Rows,
    Single,
    find,
    parser,
    provenance,
    run_missing,
)
from benchmarks.recipes.large_batch_starts import HELD_OUT, RECIPES

RESULTS = Path(__file__).parents[1] / "results" / "large_batch_trust.json"

#: Pairs of learning rate and trust coefficient, run with a warm-up of 3 epochs.
TRIED = (
    *((16.0, 0.001), (32.0, 0.001), (64.0, 0.001)),
    *((3.2, 0.01), (6.4, 0.01), (12.8, 0.01)),
    *((3.2, 0.02), (6.4, 0.02)),
)
FIXED = {"batch_size": 4096, "warmup_epochs": 3, "kind": "trial"}


def identity(lr: float, trust: float) -> dict[str, Any]:
    """Return the fields of a row that identify a run."""
    return {**FIXED, "lr": lr, "trust_coefficient": trust}


def table(rows: Rows) -> str:
    """Tabulate accuracy by the adapted weights' rate (rows) and trust coefficient (columns)."""
    coefficients = sorted({trust for _, trust in TRIED})
    lines = [
        "| learning rate × trust coefficient | "
        + " | ".join(f"held-out top-1 % with {c:g}" for c in coefficients)
        + " |",
        "|---:|" + "---:|" * len(coefficients),
    ]
    for product in sorted({round(lr * trust, 4) for lr, trust in TRIED}):
        cells = []
        for trust in coefficients:
            row = find(rows, identity(round(product / trust, 1), trust))
            cells.append(f"{row['top1']:.2f}" if row else "")
        lines.append(f"| {product:g} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parser(__doc__).parse_args()
    fixed = ["batch_size=4096", "schedule.warmup=3ep", f"data.holdout={HELD_OUT}"]
    wanted = [
        Single(
            RECIPES["lars"],
            [*fixed, f"optimizer.lr={lr}", f"optimizer.trust_coefficient={trust}"],
            identity(lr, trust),
        )
        for lr, trust in TRIED
    ]
    rows = run_missing(RESULTS, __doc__ or "", wanted, options.data, options.workers)
    text = f"{table(rows)}\n{provenance(rows)}\n"
    RESULTS.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
