"""The lines of a run's metrics, read leniently: a report of a damaged run is worth having."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..training.metric_lines import number as number
from ..training.metric_lines import parse_lines
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
    by_split: dict[str, list[Line]] = {}
    repeated = 0
    for line in found:
        lines = by_split.setdefault(str(line["split"]), [])
        while lines and lines[-1]["step"] >= line["step"]:
            lines.pop()
            repeated += 1
        lines.append({key: _finite(value) for key, value in line.items()})
    notes = []
    if damaged:
        which = ", ".join(map(str, damaged[:5])) + (", …" if len(damaged) > 5 else "")
        what = f"line {which} is" if len(damaged) == 1 else f"{len(damaged)} lines ({which}) are"
        notes.append(f"{METRICS}: {what} damaged and left out.")
    if repeated:
        what = "line was" if repeated == 1 else "lines were"
        notes.append(f"{METRICS}: {repeated} {what} replaced by later lines of the same steps.")
    return Lines(by_split, status, reason, tuple(notes))


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return number(value) if isinstance(value, float) else value
