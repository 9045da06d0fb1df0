"""Train and store single runs in addition to the grid of large_batch.py."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.recipes.large_batch import train
from largebatch.recipes.training.summary import processor, versions

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Single:
    """One run outside the grid.

    Attributes:
        recipe: Name of the recipe.
        overrides: Its overrides.
        identity: The fields of its row that identify the run; its results are added to them.
    """

    recipe: str
    overrides: Sequence[str]
    identity: Mapping[str, Any]


def find(rows: Rows, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the row of a run, or None if it has not been run."""
    return next((row for row in rows if identity.items() <= row.items()), None)


def run_missing(
    path: Path,
    claim: str,
    runs: Sequence[Single],
    data: Path,
    workers: int,
    more: Callable[[Rows], dict[str, Any]] = lambda metrics: {},
) -> Rows:
    """Train the runs that are not in the file yet, and return all rows of the file.

    Args:
        path: The file.
        claim: Docstring of the benchmark.
        runs: All runs, finished or not.
        data: Folder of the data set.
        workers: Number of runs at a time.
        more: Returns what else to keep of a run's ``metrics.jsonl``, by its lines.
    """
    rows: Rows = json.loads(path.read_text())["runs"] if path.exists() else []
    writes = Lock()

    def train_one(run: Single) -> None:
        found = train(run.recipe, data, run.overrides, more)
        with writes:
            rows.append({**run.identity, **found})
            content = {
                "claim": " ".join(claim.partition("\n\n")[0].split()),
                "machine": {"processor": processor(), "cores": len(os.sched_getaffinity(0))},
                "versions": versions(),
                "runs": rows,
            }
            path.write_text(json.dumps(content, indent=1) + "\n")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(train_one, [run for run in runs if find(rows, run.identity) is None]))
    return rows


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that calls :func:`run_missing`."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--data", type=Path, required=True, help="prepared CIFAR-10")
    made.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    return made


def provenance(rows: Rows) -> str:
    """Return the line under a table: number of runs, dates, processor and package versions."""
    dates = " to ".join(sorted({min(r["date"] for r in rows), max(r["date"] for r in rows)}))
    packages = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"{len(rows)} runs, {dates}, {processor()}, {packages}"
