"""Claim: at equal rates of the adapted weights (learning rate times trust coefficient), LARS at
batch 4,096 reaches more with a larger trust coefficient, as biases and norms take the rate itself.

    python -m benchmarks.large_batch_trust --data data/cifar10 && python -m benchmarks.tables

Single trials of large_batch.py's recipe, on 5,000 of the training images that are not trained on.
Runs that are in the results are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.large_batch import HELD_OUT, RECIPES, train
from largebatch.recipes.summary import processor, versions

RESULTS = Path(__file__).parent / "results" / "large_batch_trust.json"

#: Learning rate and trust coefficient, with a warm-up of 3 epochs.
TRIED = (
    *((16.0, 0.001), (32.0, 0.001), (64.0, 0.001)),
    *((3.2, 0.01), (6.4, 0.01), (12.8, 0.01)),
    *((3.2, 0.02), (6.4, 0.02)),
)
KEPT = {"batch_size": 4096, "warmup_epochs": 3, "kind": "trial"}


def find(rows: list[dict[str, Any]], lr: float, trust: float) -> dict[str, Any] | None:
    """The row of a run, if it was made."""
    wanted = KEPT | {"lr": lr, "trust_coefficient": trust}
    return next((row for row in rows if wanted.items() <= row.items()), None)


def table(rows: list[dict[str, Any]]) -> str:
    """Accuracy by what adapted weights take, in rows, and trust coefficient, in columns."""
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
            row = find(rows, round(product / trust, 1), trust)
            cells.append(f"{row['top1']:.2f}" if row else "")
        lines.append(f"| {product:g} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="prepared CIFAR-10")
    options = parser.parse_args()
    rows = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    for lr, trust in TRIED:
        if find(rows, lr, trust) is None:
            overrides = [f"optimizer.lr={lr}", f"optimizer.trust_coefficient={trust}"]
            overrides += ["batch_size=4096", "schedule.warmup=3ep", f"data.holdout={HELD_OUT}"]
            found = train(RECIPES["lars"], options.data, overrides)
            rows.append(KEPT | {"lr": lr, "trust_coefficient": trust} | found)
            content = {
                "claim": " ".join((__doc__ or "").partition("\n\n")[0].split()),
                "machine": {"processor": processor(), "cores": len(os.sched_getaffinity(0))},
                "versions": versions(),
                "runs": rows,
            }
            RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    packages = ", ".join(f"{name} {number}" for name, number in versions().items())
    dates = " to ".join(sorted({min(r["date"] for r in rows), max(r["date"] for r in rows)}))
    text = f"{table(rows)}\n{dates}, {processor()}, one run each, {packages}\n"
    RESULTS.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
