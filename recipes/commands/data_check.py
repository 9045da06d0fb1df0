"""The command ``largebatch data check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def data_check(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A data set, or one of its folders train and val: class folders or shards.",
        ),
    ],
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all findings to a file.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of threads that decode; default: one per core.")
    ] = None,
) -> None:
    """Read and decode every image of a data set, and report problems.

    Reports the number of images and classes, image sizes, formats and colour modes. Lists images
    that cannot be decoded, damaged ones (by libjpeg's warnings and PNG's checksums) that some
    decoders use in part, duplicates (in two classes, or in train and val), files whose extension
    belongs to another format, and shards that do not match their index.

    The exit code is 0 if training with data.verify=strict would use every image, 1 if it would stop
    or leave images out, and 2 if there is no data set at PATH.
    """
    import json

    from ...pipeline import check_data
    from ..errors import RecipeError, exit_on_user_error
    from .data_progress import Bar
    from .data_table import print_summary

    with exit_on_user_error():
        if json_ is not None and not json_.absolute().parent.is_dir():
            raise RecipeError(f"--json: there is no folder {json_.absolute().parent}")
        if workers is not None and workers < 1:
            raise RecipeError(f"--workers: {workers} is too small; valid: at least 1")
        with Bar() as bar:
            found = check_data(path, workers=workers, report=bar)
        if json_ is not None:
            try:
                json_.write_text(json.dumps(found.as_json(), indent=2) + "\n")
            except OSError as error:
                raise RecipeError(f"--json: cannot write {json_}: {error.strerror}") from error
    print_summary(found)
    raise typer.Exit(0 if found.usable else 1)
