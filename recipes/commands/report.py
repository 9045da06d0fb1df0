"""The command ``largebatch report``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import RecipeError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Page to write: a name with .html.")
    ] = None,
) -> None:
    """Show a run, or compare several, on a page or in a picture.

    With --out, the page has the curves of the runs against steps, epochs, images or seconds, what
    their recipes differ in, and what they reached. Runs which differ only in their seed are grouped
    and have 95 % intervals. It is one file that opens offline. A single run also has its trust
    ratios by layer.

    Without --out, the metrics of one run are drawn into its report.png, as the trainer does at the
    end of a run.

    A run may be still going, stopped or diverged.

    \b
      largebatch report runs/digits/* --out report.html
    """
    if out is None:
        from ..report.picture import write_picture
        from ..training.folder.outcome import begun_metrics

        if len(runs) > 1:
            raise RecipeError("--out: missing for several runs; valid: --out report.html")
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
    from ..files import write_text
    from ..report.page import render
    from ..report.runs import read_runs

    if out.suffix.lower() not in (".html", ".htm"):
        raise RecipeError(f"--out: cannot write {out}; valid: a name with .html")
    page = render(*read_runs(runs))
    try:
        # A page that is there stays until it is replaced whole; of a link, that which it leads to.
        # A folder's name may be bytes that are no UTF-8.
        write_text(out.resolve(), page.encode(errors="replace").decode())
    except OSError as error:
        raise RecipeError(
            f"--out: cannot write {out}: {error.strerror}; valid: a file in a folder that exists"
        ) from None
    print(out)
