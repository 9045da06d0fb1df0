"""The command ``largebatch report``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Page to write: a name with .html."),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            help="Top-1 in percent to tell the time and epochs to; default: the recipes' "
            "target_accuracy.",
        ),
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the tables of the page as JSON.")
    ] = False,
) -> None:
    """Show a run, or compare several, on a page or in a picture.

    With --out, the page has the curves of the runs against steps, epochs, images or seconds, what
    their recipes differ in, and what they reached. Runs which differ only in their seed are grouped
    and have 95 % intervals. It is one file that opens offline. A single run also has its trust
    ratios by layer.

    Without --out and --json, the metrics of one run are drawn into its report.png, as the trainer
    does at the end of a run.

    A run may be still going, stopped or diverged.

    \b
      largebatch report runs/digits/* --target 99 --out report.html
    """
    from ..errors import RecipeError, exit_on_user_error

    with exit_on_user_error():
        if target is not None and not 0 < target <= 100:
            raise RecipeError(f"--target: {target:g}; valid: a percentage above 0 and up to 100")
        if out is None and not json_:
            from ..report.picture import write_picture
            from ..training.folder.outcome import begun_metrics

            if len(runs) > 1:
                raise RecipeError(
                    "--out: missing for several runs; valid: --out report.html, or --json"
                )
            if target is not None:
                raise RecipeError(
                    "--target: has no part in report.png; valid: with --out or --json"
                )
            for note in begun_metrics(runs[0]).notes:
                print(f"largebatch: warning: {note}", file=sys.stderr)
            try:
                print(write_picture(runs[0]))
            except OSError as error:
                raise RecipeError(
                    f"RUN: {error.filename or runs[0]} cannot be written: {error.strerror}; valid: "
                    "a folder that can be written, or --out for a page elsewhere"
                ) from None
            return
        _compare(runs, out, target, json_)


def _compare(folders: list[Path], out: Path | None, target: float | None, as_json: bool) -> None:
    """Write the page, and print its file or its tables."""
    import json

    from ..errors import RecipeError
    from ..report.groups import groups, read_runs
    from ..report.page import write_page
    from ..report.tables import as_data

    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise RecipeError(f"--out: cannot write {out}; valid: a name with .html")
    begun, left_out = read_runs(folders)
    found = groups(begun)
    if out is not None:
        write_page(out, found, target, left_out)
    data = as_data(found, target, left_out) if as_json else None
    print(json.dumps(data, indent=2, allow_nan=False) if as_json else out)
