"""Print the table of ``largebatch runs``."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

from ..training.folder.outcome import Outcome
from ..words import duration

#: The keys by which runs are sorted, and the attribute of a run that has the value of each.
SORTS = {
    **{"run": "folder", "recipe": "recipe", "batch": "batch_size", "optimizer": "optimizer"},
    **{"top1": "top1", "epochs": "epoch", "time": "seconds", "state": "state"},
    "changed": "changed",
}

#: A terminal of this width shows a run in one line, a narrower one in two.
_WIDE = 140
_HEAD = ("recipe", "batch", "optimizer", "top-1", "epochs", "time", "state")
#: Columns of text, and the most of a text that is shown in a terminal.
_TEXTS = {"recipe": 24, "optimizer": 12, "state": 8}
_UNKNOWN = "–"  # noqa: RUF001


def sort_value(run: Outcome, key: str) -> tuple[bool, Any, str]:
    """What a run is sorted by; runs without the value come first, and equal ones by their names."""
    value = getattr(run, SORTS[key])
    return value is not None, 0 if value is None else value, str(run.folder)


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
    if width is not None:
        most = [_TEXTS.get(name) for name in _HEAD]
        rows = [tuple(map(_cut, row, most)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    names = [_printable(str(run.folder.relative_to(root))) for run in found]
    names = ["run", *(name if name != "." else _printable(str(root)) for name in names)]
    room = max(map(len, names))
    shown = []
    for row, name, run in zip(rows, names, [None, *found], strict=True):
        line = "  ".join(
            cell.ljust(wide) if column in _TEXTS else cell.rjust(wide)
            for cell, wide, column in zip(row, widths, _HEAD, strict=True)
        )
        reason = _printable(_why(run)) if run else ""
        if width is None or width >= _WIDE:
            shown.append(f"{line}  {name:{room}}  {reason}")
        else:
            shown += [line, *([f"  {name}" + f": {reason}" * bool(reason)] if run else [])]
    counts = Counter(run.state for run in found)
    states = ", ".join(f"{counts[state]} {state}" for state in sorted(counts))
    shown.append(f"{len(found):,} run{'s' * (len(found) > 1)}: {states}")
    return [_cut(line.rstrip(), width) for line in shown]


def _why(run: Outcome) -> str:
    """Why a run ended, and how much of its metrics is damaged."""
    damaged = f"damaged lines of metrics: {run.damaged_lines}" if run.damaged_lines else ""
    return "; ".join(filter(None, (run.reason, damaged)))


def _cells(run: Outcome) -> tuple[str, ...]:
    epochs = _UNKNOWN if run.epoch is None else f"{run.epoch:.1f}"
    if run.epoch is not None and run.epochs is not None and run.state != "finished":
        epochs += f" of {run.epochs:g}"
    return (
        run.recipe or _UNKNOWN,
        _UNKNOWN if run.batch_size is None else f"{run.batch_size:,}",
        run.optimizer or _UNKNOWN,
        _UNKNOWN if run.top1 is None else f"{run.top1:.2f} %",
        epochs,
        _UNKNOWN if run.seconds is None else duration(run.seconds),
        run.state,
    )


def _printable(text: str) -> str:
    """A text without control characters, and without bytes that are no UTF-8.

    Names of folders may have both, and so may recipes and reasons.
    """
    no_text = {"Cc", "Cs", "Zl", "Zp"}
    return "".join("\ufffd" if unicodedata.category(c) in no_text else c for c in text)


def _cut(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else f"{text[: width - 1]}…"
