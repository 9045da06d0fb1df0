"""The lines of a run's metrics, parsed in one way for all that read them. Imports nothing heavy."""

from __future__ import annotations

import json
import math
from typing import Any


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
