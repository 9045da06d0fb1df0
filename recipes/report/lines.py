"""The lines of a run's metrics, read leniently: a report of a damaged run is worth having."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..training.metric_lines import by_split, parse_lines
from ..training.metric_lines import number as number
from ..training.run_files import METRICS
from ..training.run_state import State, state_and_reason

Line = dict[str, Any]


@dataclass(frozen=True)
class Lines:
    """The lines of a run, ascending by step.

    Attributes:
        by_split: Lines by their ``split``. Numbers that are not finite are None.
        status: State of the run that they tell, as ``largebatch runs`` has it.
        reason: Why it ended, or the last line; may be empty.
        notes: What was left out, one line each.
    """

    by_split: dict[str, list[Line]]
    status: State
    reason: str
    notes: tuple[str, ...]


def read_lines(folder: Path) -> Lines:
    """Read the metrics of a run, which may still be written.

    Damaged lines are left out. So are lines of steps that the run made again after it was resumed
    from an earlier checkpoint.

    Raises:
        OSError: There are no metrics, or they cannot be read.
    """
    found, damaged = parse_lines((folder / METRICS).read_bytes())
    status, reason = state_and_reason(folder, found)
    lines, notes = by_split(found, damaged)
    return Lines(lines, status, reason, tuple(notes))
