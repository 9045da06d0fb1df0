"""The command ``largebatch report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import RecipeError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="Page to write; default: report.html in the run's folder."
        ),
    ] = None,
) -> None:
    """Show a run, or compare several, on a page.

    It has the curves of the runs against steps, epochs, images or seconds, what their recipes
    differ in, and what they reached. Runs which differ only in their seed are grouped and have 95 %
    intervals. A single run also has its trust ratios by layer. The page is one file that opens
    offline. A run may be still going, stopped or diverged.

    \b
      largebatch report runs/digits/* --out digits.html
    """
    from ..files import write_text
    from ..report.page import render
    from ..report.runs import read_runs

    if out is None:
        if len(runs) > 1:
            raise RecipeError("--out: missing for several runs; valid: --out report.html")
        out = runs[0] / "report.html"
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
