"""The lines of a run's metrics, parsed in one way for all that read them. Imports nothing heavy."""

from __future__ import annotations

import json
import math
from typing import Any

from .run_files import METRICS


def parse_lines(content: bytes) -> tuple[list[dict[str, Any]], list[int]]:
    """Parse the content of a run's metrics, which may still be written.

    Returns:
        The lines that have a split, a step and an epoch, in order, and the numbers of the damaged
        ones, from 1. A last line without an end, which is being written or was cut short by a
        crash, is in neither.
    """
    *whole, _ = content.split(b"\n")
    lines, damaged = [], []
    for place, text in enumerate(whole, 1):
        if not text:
            continue
        try:
            line: Any = json.loads(text)
        except ValueError:  # also of bytes that are no UTF-8
            line = None
        if _is_placed(line):
            lines.append(line)
        else:
            damaged.append(place)
    return lines, damaged


def by_split(
    found: list[dict[str, Any]], damaged: list[int]
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Sort what :func:`parse_lines` returned, for a reader that shows damaged runs too.

    Returns:
        Lines by their ``split``, ascending by step, with None for numbers that are not finite. Of
        steps that were made again after a resume they are the later ones. Then what was left out, a
        sentence each.
    """
    lines: dict[str, list[dict[str, Any]]] = {}
    repeated = 0
    for line in found:
        of_split = lines.setdefault(str(line["split"]), [])
        while of_split and of_split[-1]["step"] >= line["step"]:
            of_split.pop()
            repeated += 1
        of_split.append({key: _finite(value) for key, value in line.items()})
    notes = []
    if damaged:
        which = ", ".join(map(str, damaged[:5])) + (", …" if len(damaged) > 5 else "")
        what = f"line {which} is" if len(damaged) == 1 else f"{len(damaged)} lines ({which}) are"
        notes.append(f"{METRICS}: {what} damaged and left out.")
    if repeated:
        what = "line was" if repeated == 1 else "lines were"
        notes.append(f"{METRICS}: {repeated} {what} replaced by later lines of the same steps.")
    return lines, notes


def number(value: Any) -> float | None:
    """Return a value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _is_placed(line: Any) -> bool:
    """Whether a line of metrics says which split, step and epoch it is of."""
    if not isinstance(line, dict) or not line.keys() >= {"split", "step", "epoch"}:
        return False
    step, epoch = line["step"], line["epoch"]
    is_step = isinstance(step, int) and not isinstance(step, bool) and step >= 0
    return is_step and number(epoch) is not None


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return number(value) if isinstance(value, float) else value
