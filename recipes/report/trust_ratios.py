"""The trust ratios of each layer over the steps of a run, as a heat map."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .lines import Line, number
from .run import Run

_MOST_COLUMNS = 300  # more than there are pixels for


@dataclass(frozen=True)
class HeatMap:
    """Trust ratios by layer and by steps.

    Attributes:
        layers: Name of each row, in the order of the model.
        edges: Steps at the edges of the columns, one more than there are columns: a column is of
            the steps after its left edge up to its right one.
        least: Least ratio of each layer in each column; None if it has none.
        median: Median ratio.
        greatest: Greatest ratio.
        merged: Number of readings in a column. The median of several is that of their medians.
    """

    layers: list[str]
    edges: list[int]
    least: list[list[float | None]]
    median: list[list[float | None]]
    greatest: list[list[float | None]]
    merged: int


def heat_map(run: Run) -> HeatMap | None:
    """Return the heat map of a run; None if it recorded no trust ratios."""
    lines = run.trust_ratios
    layers = list(dict.fromkeys(key for line in lines for key in line if _is_layer(line[key])))
    if not layers:
        return None
    merged = -(-len(lines) // _MOST_COLUMNS)
    columns = [lines[i : i + merged] for i in range(0, len(lines), merged)]
    parts = [_rows(layers, columns, place) for place in range(3)]
    edges = [0, *(column[-1]["step"] for column in columns)]
    return HeatMap(layers, edges, parts[0], parts[1], parts[2], merged)


def _is_layer(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3


def _rows(
    layers: Sequence[str], columns: Sequence[Sequence[Line]], place: int
) -> list[list[float | None]]:
    merge = (min, statistics.median, max)[place]
    rows = []
    for layer in layers:
        row: list[float | None] = []
        for column in columns:
            found = [n for line in column if (n := _at(line.get(layer), place)) is not None]
            row.append(float(f"{merge(found):.6g}") if found else None)
        rows.append(row)
    return rows


def _at(value: Any, place: int) -> float | None:
    return number(value[place]) if _is_layer(value) else None
