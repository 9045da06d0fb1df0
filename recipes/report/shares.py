"""Where the time of training went: the shares of the phases of its steps.

A line of training holds the seconds of each phase, all of rank 0, unless the run is of a version
that did not measure them. What no phase took is the rest, so the shares add up to 100 %. Where the
clocks of a GPU and its host make the phases exceed the time of the line, the rest is 0 and the
shares are of their sum.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from ..files import number
from ..training.folder.outcome import Line
from ..training.watch.clocks import PHASES
from .groups import Group

#: Names of the parts, in the order in which they are shown: :data:`PHASES` and the rest.
TITLES = {
    "input_seconds": "waiting for input",
    "copy_seconds": "copying to the device",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "all_reduce_seconds": "all-reduce wait",
    "optimizer_seconds": "optimizer",
    "rest": "rest",
}

#: What each line has that records phases; copies need a GPU, and all-reduces several ranks.
_ALWAYS = {"input_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"}

_MOST_ROWS = 16  # more runs than these are shown by group

#: The share of each part in percent, by key of :data:`TITLES`; empty if nothing records them.
Shares = dict[str, float]


def shares(lines: Sequence[Line]) -> Shares:
    """Return the shares of the time of some lines; they add up to 100."""
    sums = _each(recording(lines), math.fsum)
    return {key: 100 * value / math.fsum(sums.values()) for key, value in sums.items()}


def recording(lines: Sequence[Line]) -> list[dict[str, float]]:
    """Return the seconds of each part of those lines that hold them all, undamaged."""
    return [parts for line in lines if (parts := _parts(line))]


def by_run(found: Sequence[Group]) -> dict[str, Shares]:
    """Return the shares of each run, or, if there are many, the means of each group's runs."""
    of = {g.name: {name: shares(run.train) for name, run in g.runs.items()} for g in found}
    if sum(map(len, of.values())) <= _MOST_ROWS:
        return {name: each for rows in of.values() for name, each in rows.items()}
    return {
        group: _each([row for row in rows.values() if row], statistics.fmean)
        for group, rows in of.items()
    }


def _each(rows: Sequence[Shares], merge: Callable[[list[float]], float]) -> Shares:
    """Rows merged into one, part by part."""
    keys = [key for key in TITLES if any(key in row for row in rows)]
    return {key: merge([row.get(key, 0.0) for row in rows]) for key in keys}


def _parts(line: Line) -> dict[str, float]:
    seconds = number(line.get("seconds")) or 0.0
    found = {key: number(line[key]) for key in PHASES if key in line}
    known = {key: value for key, value in found.items() if value is not None and value >= 0}
    if seconds <= 0 or len(known) < len(found) or not known.keys() >= _ALWAYS:
        return {}
    return {**known, "rest": max(0.0, seconds - math.fsum(known.values()))}
