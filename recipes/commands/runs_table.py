"""Print the table of ``largebatch runs``."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..training.folder.outcome import Outcome

#: The keys by which runs are sorted, each with its value in a run.
SORTS: dict[str, Callable[[Outcome], Any]] = {
    "run": lambda run: str(run.folder),
    "recipe": lambda run: run.recipe,
    "batch": lambda run: run.batch_size,
    "optimizer": lambda run: run.optimizer,
    "top1": lambda run: run.top1,
    "epochs": lambda run: run.epoch,
    "time": lambda run: run.seconds,
    "state": lambda run: run.state,
    "changed": lambda run: run.changed,
}

#: A terminal of this width shows a run in one line, a narrower one in two.
_WIDE = 140
_HEAD = ("recipe", "batch", "optimizer", "top-1", "epochs", "time", "state")
_TO_THE_LEFT = ("recipe", "optimizer", "state")
_GAP = "  "
_UNKNOWN = "–"  # noqa: RUF001
#: Columns of text that are cut where a terminal is too narrow, and the least that is left of each.
_CUT = {"recipe": 12, "optimizer": 9}


def sort_value(run: Outcome, key: str) -> tuple[bool, Any, str]:
    """What a run is sorted by; runs without the value come first, and equal ones by their names."""
    value = SORTS[key](run)
    return value is not None, 0 if value is None else value, str(run.folder)


def as_json(run: Outcome) -> dict[str, Any]:
    """A run as JSON can hold it; accuracies in percent, times in seconds."""
    return {**asdict(run), "folder": str(run.folder)}


def print_table(found: list[Outcome], root: Path) -> None:
    """Print runs as a table on standard output, in lines of at most the terminal's width.

    Where the output is no terminal of a stated width, no line is cut.
    """
    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = shutil.get_terminal_size().columns if told else None
    for line in lines(found, root, width):
        print(line)


def lines(found: list[Outcome], root: Path, width: int | None) -> list[str]:
    """The lines of the table.

    Args:
        found: The runs.
        root: The folder to which their names are relative.
        width: Length of the longest line; None: any.
    """
    rows = [_HEAD, *(tuple(map(_printable, _cells(run))) for run in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        for index, name in enumerate(_HEAD):
            over = sum(widths) + len(_GAP) * (len(_HEAD) - 1) - width
            if over > 0 and name in _CUT:
                widths[index] = max(_CUT[name], widths[index] - over)
    names = ["run", *(_printable(_name(run.folder, root)) for run in found)]
    one_line = width is None or width >= _WIDE
    room = max(map(len, names))
    told = []
    for row, name, run in zip(rows, names, [None, *found], strict=True):
        cells = (_cell(*each) for each in zip(row, widths, _HEAD, strict=True))
        line = _GAP.join(cells)
        reason = _printable(_why(run)) if run else ""
        if one_line:
            told.append(_cut(f"{line}{_GAP}{name:{room}}{_GAP}{reason}".rstrip(), width))
            continue
        told.append(_cut(line.rstrip(), width))
        if run:
            told.append(_cut(f"{_GAP}{name}" + f": {reason}" * bool(reason), width))
    counts = Counter(run.state for run in found)
    states = ", ".join(f"{counts[state]} {state}" for state in sorted(counts))
    return [*told, f"{len(found):,} run{'s' * (len(found) > 1)}: {states}"]


def _why(run: Outcome) -> str:
    """Why a run ended, and how much of its metrics is damaged."""
    damaged = f"damaged lines of metrics: {run.damaged_lines}" if run.damaged_lines else ""
    return "; ".join(filter(None, (run.reason, damaged)))


def _cells(run: Outcome) -> tuple[str, ...]:
    return (
        run.recipe or _UNKNOWN,
        _UNKNOWN if run.batch_size is None else f"{run.batch_size:,}",
        run.optimizer or _UNKNOWN,
        _UNKNOWN if run.top1 is None else f"{run.top1:.2f} %",
        _epochs(run),
        _UNKNOWN if run.seconds is None else _time(run.seconds),
        run.state,
    )


def _epochs(run: Outcome) -> str:
    """The epochs of a run, and how many it was to have unless it has finished."""
    if run.epoch is None:
        return _UNKNOWN
    if run.state == "finished" or run.epochs is None:
        return f"{run.epoch:.1f}"
    return f"{run.epoch:.1f} of {run.epochs:g}"


def _time(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _name(folder: Path, root: Path) -> str:
    return str(folder) if folder == root else str(folder.relative_to(root))


def _printable(text: str) -> str:
    """A text without control characters, and without bytes that are no UTF-8.

    Names of folders may have both, and so may recipes and reasons.
    """
    no_text = {"Cc", "Cs", "Zl", "Zp"}
    return "".join("\ufffd" if unicodedata.category(c) in no_text else c for c in text)


def _cell(text: str, width: int, column: str) -> str:
    text = _cut(text, width)
    return text.ljust(width) if column in _TO_THE_LEFT else text.rjust(width)


def _cut(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else f"{text[: width - 1]}…"
