"""Where the time of training went: the shares of the phases of its steps.

A line of training holds the seconds of each phase, unless the run is of a version that did not
measure them. What no phase took is the rest, so the shares of a line add up to 1. All are of
rank 0. Where the clocks of a GPU and its host make them exceed the time of the line, the rest is 0
and the shares are of their sum.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..training.watch.run_clock import PHASES
from .groups import Group
from .lines import Line, number
from .run import Run

REST = "rest"

#: Names of the parts, in the order in which they are shown: :data:`PHASES` and the rest.
TITLES = {
    "input_seconds": "waiting for input",
    "copy_seconds": "copying to the device",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "all_reduce_seconds": "all-reduce wait",
    "optimizer_seconds": "optimizer",
    REST: "rest",
}

#: What each line has that records phases; copies need a GPU, and all-reduces several ranks.
_ALWAYS = {"input_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"}

#: More runs than these are told by group.
_MOST_ROWS = 16
_MOST_COLUMNS = 300  # of a picture; more bars are too thin to see

#: Why a run, or a part of it, has no shares.
ABSENT = "Older runs do not record the phases of a step."


@dataclass(frozen=True)
class Shares:
    """The shares of one run over its whole length.

    Attributes:
        percent: Share of each part in percent, by key of :data:`TITLES`; they add up to 100.
        readings: Number of lines that they are of.
        of: Number of lines of training.
    """

    percent: dict[str, float]
    readings: int
    of: int


@dataclass(frozen=True)
class Stack:
    """The shares of one run over its steps.

    Attributes:
        keys: The parts, keys of :data:`TITLES` in their order.
        edges: Steps at the edges of the columns, one more than there are columns: a column is of
            the steps after its left edge up to its right one.
        percent: Share of each part in each column; None in a column that does not record them.
        merged: Number of readings in a column.
    """

    keys: list[str]
    edges: list[int]
    percent: list[list[float | None]]
    merged: int


@dataclass(frozen=True)
class Row:
    """A run or a group, to be compared with others.

    Attributes:
        name: Its name.
        percent: Mean share of each part in percent, by key of :data:`TITLES`; None if no run
            records them.
        note: What part of the readings or runs the shares are of; empty if of all.
    """

    name: str
    percent: dict[str, float] | None
    note: str = ""


def is_recorded(run: Run) -> bool:
    """Whether a reading of a run records its parts."""
    return any(_parts(line) for line in run.train)


def whole(run: Run) -> Shares | None:
    """Return the shares of a run over its whole length; None if it does not record them."""
    parts = [found for line in run.train if (found := _parts(line))]
    return Shares(_percent(parts), len(parts), len(run.train)) if parts else None


def stack(run: Run) -> Stack | None:
    """Return the shares of a run over its steps; None if it does not record them."""
    lines = run.train
    parts = [_parts(line) for line in lines]
    keys = [key for key in TITLES if any(key in each for each in parts if each)]
    if not keys:
        return None
    merged = -(-len(lines) // _MOST_COLUMNS)
    starts = range(0, len(lines), merged)
    columns = [_percent([each for each in parts[i : i + merged] if each]) for i in starts]
    edges = [0, *(lines[min(i + merged, len(lines)) - 1]["step"] for i in starts)]
    percent = [
        [round(column.get(key, 0.0), 4) if column else None for column in columns] for key in keys
    ]
    return Stack(keys, edges, percent, merged)


def rows(found: Sequence[Group]) -> list[Row]:
    """Return the shares of each run, or of each group if there are many runs.

    Those of a group are the means over its runs that record them.
    """
    if sum(len(group.runs) for group in found) <= _MOST_ROWS:
        return [_row(name, run) for group in found for name, run in group.runs.items()]
    return [_mean(group) for group in found]


def _row(name: str, run: Run) -> Row:
    shares = whole(run)
    if shares is None:
        return Row(name, None)
    some = f"{shares.readings} of {shares.of} readings" if shares.readings < shares.of else ""
    return Row(name, shares.percent, some)


def _mean(group: Group) -> Row:
    having = [shares.percent for run in group.runs.values() if (shares := whole(run))]
    if not having:
        return Row(group.name, None)
    keys = [key for key in TITLES if any(key in each for each in having)]
    percent = {key: statistics.fmean(each.get(key, 0.0) for each in having) for key in keys}
    some = f"{len(having)} of {len(group.runs)} runs" if len(having) < len(group.runs) else ""
    return Row(group.name, percent, some)


def _parts(line: Line) -> dict[str, float] | None:
    """The seconds of each part of a line of training; None if it does not hold them all."""
    seconds = number(line.get("seconds"))
    found: dict[str, float] = {}
    for key in PHASES:
        if key in line:
            value = number(line[key])
            if value is None or value < 0:
                return None
            found[key] = value
    if seconds is None or seconds <= 0 or not found.keys() >= _ALWAYS:
        return None
    return {**found, REST: max(0.0, seconds - math.fsum(found.values()))}


def _percent(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Shares of the sum of some lines; empty without lines."""
    sums = {
        key: math.fsum(each.get(key, 0.0) for each in parts)
        for key in TITLES
        if any(key in each for each in parts)
    }
    total = math.fsum(sums.values())
    return {key: 100 * value / total for key, value in sums.items()}
