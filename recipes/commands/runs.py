"""The command ``largebatch runs``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...pipeline import printable
from ..errors import RecipeError, but_valid

if TYPE_CHECKING:
    from ..training.folder.outcome import Outcome

#: The keys by which runs are sorted, and the attribute of a run that has the value of each.
SORTS = {
    **{"run": "folder", "recipe": "recipe", "batch": "batch_size", "optimizer": "optimizer"},
    **{"top1": "top1", "epochs": "epoch", "time": "seconds", "state": "state"},
    "changed": "changed",
}
_HEAD = ("recipe", "batch", "optimizer", "top-1", "epochs", "time", "state")
#: Columns of text, and the most of a text that is shown in a terminal.
_TEXTS = {"recipe": 24, "optimizer": 12, "state": 8}
_UNKNOWN = "–"  # noqa: RUF001


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that holds runs, at any depth.")
    ] = Path("runs"),
    sort: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            help="run, recipe, batch, optimizer, top1, epochs, time, state or changed (when its "
            "metrics were last written); upwards, runs without the value first.",
        ),
    ] = "run",
    reverse: Annotated[bool, typer.Option("--reverse", help="Sort downwards.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of a table, with more values.")
    ] = False,
) -> None:
    """List the runs in a folder, with their accuracy and state.

    A run is running, stopped (by a signal or a callback), finished, diverged or failed (by an
    error, or killed). Below it stands its folder and why it ended, or the last line of its metrics.
    Accuracy is that of the last evaluation, and time is that spent training.

    \b
      largebatch runs
      largebatch runs tuning --sort top1
    """
    import json
    from dataclasses import asdict

    from ..training.folder.outcome import find_runs, outcome_of

    if sort not in SORTS:
        known = list(SORTS)
        raise RecipeError(
            f"--sort: unknown key {sort!r}{but_valid(sort, known)}: {', '.join(known)}"
        )
    if not folder.is_dir():
        raise RecipeError(f"DIR: no folder {folder}; valid: a folder that holds runs")
    found = [outcome_of(path) for path in find_runs(folder)]
    if not found and not json_:
        raise RecipeError(
            f"DIR: {folder} holds no run; valid: the folder of a run, which has a "
            "metrics.jsonl, or one that holds some"
        )
    found.sort(key=lambda run: sort_value(run, sort), reverse=reverse)
    if json_:
        runs_as_json = [{**asdict(run), "folder": str(run.folder)} for run in found]
        print(json.dumps(runs_as_json, indent=2))
        return
    # A file or a pipe gets whole lines, one for each run.
    is_terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = shutil.get_terminal_size().columns if is_terminal else None
    print("\n".join(lines(found, folder, width)))


def sort_value(run: Outcome, key: str) -> tuple[bool, Any, str]:
    """What a run is sorted by; runs without the value come first, and equal ones by their names."""
    value = getattr(run, SORTS[key])
    return value is not None, 0 if value is None else value, str(run.folder)


def lines(found: list[Outcome], root: Path, width: int | None) -> list[str]:
    """The table of runs, named relative to ``root``, in lines of at most ``width`` if it is given.

    Each run then has a second line.
    """
    from collections import Counter

    rows = [_HEAD, *(tuple(map(printable, _cells(run))) for run in found)]
    if width is not None:
        most = [_TEXTS.get(name) for name in _HEAD]
        rows = [tuple(map(_cut, row, most)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = []
    for row, run in zip(rows, [None, *found], strict=True):
        line = "  ".join(
            cell.ljust(wide) if column in _TEXTS else cell.rjust(wide)
            for cell, wide, column in zip(row, widths, _HEAD, strict=True)
        )
        named = printable(_named(run, root)) if run else "run" if width is None else ""
        shown += [f"{line}  {named}"] if width is None else [line, f"  {named}"]
    counts = Counter(run.state for run in found)
    states = ", ".join(f"{counts[state]} {state}" for state in sorted(counts))
    shown.append(f"{len(found):,} run{'s' * (len(found) > 1)}: {states}")
    return [_cut(line.rstrip(), width) for line in shown if line.strip()]


def _named(run: Outcome, root: Path) -> str:
    """The folder of a run, why it ended, and how much of its metrics is damaged."""
    name = str(run.folder.relative_to(root) if run.folder != root else root)
    damaged = f"damaged lines of metrics: {run.damaged_lines}" if run.damaged_lines else ""
    return ": ".join(filter(None, (name, "; ".join(filter(None, (run.reason, damaged))))))


def _cells(run: Outcome) -> tuple[str, ...]:
    from ..words import duration

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


def _cut(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else f"{text[: width - 1]}…"
