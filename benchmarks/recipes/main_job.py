"""Claim: the recipe digits reaches 98.5 % top-1 with each of the seeds 0, 1 and 2, in less than
3 minutes on 2 cores, on 1, 2 and 4 ranks alike.

    python -m benchmarks.recipes.main_job [--ranks 1 2 4] [--seeds 0 1 2]

Each run is started with the command line as a user would start it. Its time covers the whole
command, including imports, evaluation, checkpoints and the report. Results are written to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from subprocess import run

from largebatch.pipeline import prepare_digits
from largebatch.recipes.training.summary import processor, versions

RESULTS = Path(__file__).parents[1] / "results"


def train(folder: Path, ranks: int, seed: int) -> dict[str, float]:
    """Train the recipe once and return its row of the results."""
    run_dir = folder / f"ranks-{ranks}-seed-{seed}"
    command = [sys.executable, "-m", "largebatch.recipes.commands.app", "train", "digits"]
    command += [f"data.path={folder / 'digits'}", f"run_dir={run_dir}", f"seed={seed}"]
    start = time.perf_counter()
    run([*command, "--nproc", str(ranks)], check=True, stdout=sys.stderr)
    wall_seconds = time.perf_counter() - start
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "ranks": ranks,
        "seed": seed,
        "top1": round(summary["top1"], 2),
        "wall_seconds": round(wall_seconds, 1),
        "train_seconds": summary["train_seconds"],
        "images_per_second": summary["images_per_second"],
        "wait_percent": round(100 * summary["wait_share"], 1),
        "precision": summary["precision"],
    }


def table(rows: list[dict[str, float]]) -> str:
    """Format the rows as a Markdown table."""
    head = (
        "| ranks | seed | top-1 % | whole command, s | training, s | images/s | waiting for data |"
    )
    lines = [head, "|" + "---:|" * 7]
    for row in rows:
        lines.append(
            f"| {row['ranks']} | {row['seed']} | {row['top1']:.2f} | {row['wall_seconds']:.0f} "
            f"| {row['train_seconds']:.0f} | {row['images_per_second']:.0f} "
            f"| {row['wait_percent']:.1f} % |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_digits(folder / "digits")
        for seed in options.seeds:
            for ranks in options.ranks:
                rows.append(train(folder, ranks, seed))
                print(rows[-1], flush=True)
    rows.sort(key=lambda row: (row["ranks"], row["seed"]))
    result = {
        "claim": "recipe digits: top-1 >= 98.5 % for each seed, < 180 s, on any number of ranks",
        "date": date.today().isoformat(),
        "machine": {"processor": processor(), "cores": len(os.sched_getaffinity(0))},
        "versions": versions(),
        "lowest_top1": min(row["top1"] for row in rows),
        "longest_wall_seconds": max(row["wall_seconds"] for row in rows),
        "mean_top1_by_ranks": {
            str(n): round(statistics.mean(r["top1"] for r in rows if r["ranks"] == n), 2)
            for n in options.ranks
        },
        "runs": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "main_job.json").write_text(json.dumps(result, indent=2) + "\n")
    about = f"{result['date']}, {processor()}, {result['machine']['cores']} cores, "
    about += ", ".join(f"{package} {number}" for package, number in versions().items())
    (RESULTS / "main_job.md").write_text(f"{table(rows)}\n{about}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
