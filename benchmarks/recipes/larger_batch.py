"""Claim: a recipe with mixup and RandAugment loses accuracy at four times its batch in equal
epochs, unless its optimizer and its learning rate are chosen anew.

    python -m benchmarks.recipes.larger_batch --data data/cifar10

The recipe is that of the guide "Take your recipe to 8k, 32k, 64k": the ResNet-9 of `cifar10-b256`
on 500 images of each class of CIFAR-10 for 6 epochs, scored on 200 test images of each class, with
seeds 0 to 2. Nothing is tuned. Intervals are Student's t at 95 %; differences are paired by seed.
Results are written to benchmarks/results/larger_batch.json and larger_batch.md.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from scipy.stats import t

from benchmarks import tables

SEEDS = (0, 1, 2)
IMAGES = {"train": 500, "val": 200}  # of each class
MIXED = "mixing.mixup=0.2 data.auto_augment=rand-m7-mstd0.5-inc1"
LARGE = "batch_size=1024 scale=sqrt"
#: What is compared: a recipe and its overrides. Differences are from the first.
CASES = {
    "LARS, 256": ("cifar10-b256", MIXED),
    "LARS, 1,024": ("cifar10-b256", f"{MIXED} {LARGE}"),
    "Muon, 1,024": ("cifar10-muon-b256", f"{MIXED} {LARGE}"),
    "LARS, 256, without mixup and RandAugment": ("cifar10-b256", ""),
}
COMMON = "epochs=6 schedule.warmup=1ep evaluate_every=1dur checkpoint.every=null track=[]"


def part_of(data: Path, out: Path) -> Path:
    """Link the first images of each class of prepared CIFAR-10 into a folder of its own."""
    for split, number in IMAGES.items():
        for folder in sorted((data / split).iterdir()):
            (out / split / folder.name).mkdir(parents=True)
            for image in sorted(folder.iterdir())[:number]:
                (out / split / folder.name / image.name).symlink_to(image.resolve())
    return out


def train(recipe: str, overrides: str, data: Path, seed: int, run_dir: Path) -> float:
    """Train a recipe and return its top-1 at the end, in percent."""
    command = [sys.executable, "-m", "largebatch.recipes", "train", recipe]
    command += [f"data.path={data}", f"run_dir={run_dir}", f"seed={seed}"]
    subprocess.run([*command, *COMMON.split(), *overrides.split()], check=True, stdout=sys.stderr)
    return round(float(json.loads((run_dir / "summary.json").read_text())["top1"]), 2)


def interval(values: list[float]) -> str:
    """The mean of some values with its interval."""
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.1f} ± {half:.1f}"


def table(rows: dict[str, list[float]]) -> str:
    """Tabulate the cases and their differences from the first."""
    first = next(iter(rows.values()))
    cells = []
    for name, top1 in rows.items():
        apart = [one - other for one, other in zip(top1, first, strict=True)]
        difference = "" if top1 is first else interval(apart)
        cells.append((name, ", ".join(f"{v:.2f}" for v in top1), interval(top1), difference))
    columns = ("optimizer, batch", "top-1 %, seeds 0 to 2", "mean", "minus the first")
    return tables.table(dict(zip(columns, "llrr", strict=True)), cells)


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="prepared CIFAR-10")
    rows: dict[str, list[float]] = {name: [] for name in CASES}
    data = parser.parse_args().data
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = part_of(data, folder / "images")
        for seed in SEEDS:
            for number, (case, (recipe, overrides)) in enumerate(CASES.items()):
                run_dir = folder / f"run-{number}-{seed}"
                rows[case].append(train(recipe, overrides, images, seed, run_dir))
                print(case, seed, rows[case][-1], flush=True)
    content = {"claim": tables.claim_of(__doc__), **tables.origin(), "top1": rows}
    tables.store(tables.RESULTS / "larger_batch.json", content)
    text = f"{table(rows)}\n\n{tables.about()}\n"
    (tables.RESULTS / "larger_batch.md").write_text(text, encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
