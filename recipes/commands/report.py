"""The command ``largebatch report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")],
) -> None:
    """Plot a run's metrics into its report.png.

    The trainer does so itself at the end of a run. This command also works on a run that was
    stopped or is still going.
    """
    from ..errors import exit_on_user_error
    from ..training.report import write_report

    with exit_on_user_error():
        print(write_report(run_dir))
