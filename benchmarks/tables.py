"""What the benchmarks share: where results go, tables, and what a result says of its machine."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from largebatch.recipes.training.folder.ending import processor, versions

#: Where the benchmarks write their results, which the pages in docs/results include.
RESULTS = Path(__file__).parent / "results"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of the script, as it is written."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def claim_of(doc: str | None) -> str:
    """Return the first paragraph of a script's docstring as one line."""
    return " ".join((doc or "").partition("\n\n")[0].split())


def table(columns: dict[str, str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown."""
    ends = "|".join("---:" if side == "r" else "---" for side in columns.values())
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], f"|{ends}|", *lines[1:]])


def median_and_range(values: Sequence[float], places: int = 2) -> str:
    """Return ``median (least to most)``."""
    low, middle, high = (f"{f(values):.{places}f}" for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"


def packages(*more: str) -> dict[str, str]:
    """Return the versions of the installed packages that results depend on, and of ``more``."""
    return versions() | {name: version(name) for name in more}


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def origin(*more: str) -> dict[str, Any]:
    """Return what a stored result says of its date, machine and packages."""
    machine = {"processor": processor(), "cores": cores()}
    return {"date": date.today().isoformat(), "machine": machine, "versions": packages(*more)}


def about(*between: str, more: Sequence[str] = (), day: str = "") -> str:
    """Return the line under a table: date, machine, what is ``between``, and packages."""
    found = ", ".join(f"{name} {number}" for name, number in packages(*more).items())
    parts = (day or date.today().isoformat(), processor(), f"{cores()} cores", *between, found)
    return ", ".join(parts)


def store(path: Path, content: Any) -> None:
    """Write a result as JSON; a script that is stopped leaves the former file whole."""
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    unfinished.replace(path)
