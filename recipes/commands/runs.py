"""The command ``largebatch runs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def runs(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder that holds runs, at any depth."),
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
    error, or killed). Beside its folder stands why it ended, or the last line of its metrics.
    Accuracy is that of the last evaluation, and time is that spent training.

    \b
      largebatch runs
      largebatch runs tuning --sort top1
    """
    import json
    from dataclasses import asdict

    from ..errors import RecipeError, but_valid, exit_on_user_error
    from ..training.folder.outcome import find_runs, outcome_of
    from .runs_table import SORTS, print_table, sort_value

    with exit_on_user_error():
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
    print_table(found, folder)
