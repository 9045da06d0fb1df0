"""Single runs beside the grid of large_batch.py, kept in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.recipes.large_batch import RECIPES, train
from largebatch.recipes.training.summary import processor, versions

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Single:
    """One run.

    Attributes:
        optimizer: of ``large_batch.RECIPES``.
        overrides: of its recipe.
        told: what its row has, beside what it reached; tells it from the others.
    """

    optimizer: str
    overrides: Sequence[str]
    told: Mapping[str, Any]


def find(rows: Rows, told: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row of a run, if it was made."""
    return next((row for row in rows if told.items() <= row.items()), None)


def make(path: Path, claim: str, runs: Sequence[Single], data: Path, workers: int) -> Rows:
    """Make the runs that are not in the file yet, and give all rows of the file."""
    rows: Rows = json.loads(path.read_text())["runs"] if path.exists() else []
    writes = Lock()

    def one(run: Single) -> None:
        found = train(RECIPES[run.optimizer], data, run.overrides)
        with writes:
            rows.append({**run.told, **found})
            content = {
                "claim": " ".join(claim.partition("\n\n")[0].split()),
                "machine": {"processor": processor(), "cores": len(os.sched_getaffinity(0))},
                "versions": versions(),
                "runs": rows,
            }
            path.write_text(json.dumps(content, indent=1) + "\n")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, [run for run in runs if find(rows, run.told) is None]))
    return rows


def made_on(rows: Rows) -> str:
    """The line under a table: when, on what, with which packages."""
    dates = " to ".join(sorted({min(r["date"] for r in rows), max(r["date"] for r in rows)}))
    packages = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"{dates}, {processor()}, one run each, {packages}"
