"""The commands ``largebatch data check`` and ``index``; ``prepare`` has a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .prepare import prepare_app

data_app = typer.Typer(
    help="Prepare data sets, check and index them.", no_args_is_help=True, rich_markup_mode=None
)
data_app.add_typer(prepare_app, name="prepare")


@data_app.command()
def check(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A data set, or its folder train or val; class folders or shards."
        ),
    ],
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all that was found to it.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Threads or processes that decode; default: one per core.")
    ] = None,
) -> None:
    """Read and decode every image; tell what is wrong.

    Tells images and classes, sizes, formats and colour modes; what cannot be decoded, what is
    there twice (in two classes, or in train and val), what has the extension of another format,
    and shards that are not what their index says.

    The exit code is 0 where nothing would stop training, 1 where something would, and 2 where
    there is no data set at PATH.
    """
    import json

    from ...pipeline import check_data
    from ..errors import RecipeError, exit_on_user_error
    from .data_progress import Bar
    from .data_table import tell

    with exit_on_user_error():
        if json_ is not None and not json_.absolute().parent.is_dir():
            raise RecipeError(f"--json: there is no folder {json_.absolute().parent}")
        _positive("--workers", workers)
        with Bar() as bar:
            found = check_data(path, workers=workers, processes=True, report=bar)
        if json_ is not None:
            try:
                json_.write_text(json.dumps(found.as_json(), indent=2) + "\n")
            except OSError as error:
                raise RecipeError(f"--json: cannot write {json_}: {error.strerror}") from error
    tell(found)
    raise typer.Exit(0 if found.usable else 1)


@data_app.command()
def index(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Shards of one split, such as DIR/train.")
    ],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="webdataset, tfrecord or recordio; default: what the names of the files say.",
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB",
            help="Which files are shards: '*.tar', 'train-{00000..01023}-of-01024'; default: all "
            "whose names say so.",
        ),
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Names of the classes, one per line in the order of their numbers; default: those "
            "that the shards tell, else their numbers.",
        ),
    ] = None,
    label_offset: Annotated[
        int,
        typer.Option(
            min=0, help="What labels count from: 1 in TensorFlow's own conversion of ImageNet."
        ),
    ] = 0,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Add the SHA-256 of each shard; reads all of them.")
    ] = False,
) -> None:
    """Write index.npz beside shards that other tools have written.

    It tells where each image lies. Training on shards without it scans them at each start; shards
    on a server must have it.
    """
    from ...pipeline import INDEX_FILE, DataError, Progress, index_shards
    from ..errors import exit_on_user_error
    from .data_progress import Bar

    with exit_on_user_error(), Bar() as bar:

        def report(done_bytes: int, total_bytes: int) -> None:
            bar(Progress("indexing", bytes=done_bytes, total_bytes=total_bytes))

        found = index_shards(
            folder,
            format_,
            pattern=pattern,
            classes=_names(classes) if classes else None,
            label_offset=label_offset,
            checksums=checksums,
            progress=report,
        )
        try:
            found.save(folder / INDEX_FILE)
        except OSError as error:
            raise DataError(f"{folder / INDEX_FILE} cannot be written: {error.strerror}") from error
    print(
        f"{folder / INDEX_FILE}: {len(found):,} images of {len(found.classes):,} classes in "
        f"{len(found.shards):,} shards of {found.format}"
    )


def _names(path: Path) -> tuple[str, ...]:
    """The lines of a file."""
    from ..errors import RecipeError

    try:
        return tuple(path.read_text().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--classes: {path} cannot be read: {error}") from error


def _positive(option: str, value: int | None) -> None:
    from ..errors import RecipeError

    if value is not None and value < 1:
        raise RecipeError(f"{option}: {value} must be at least 1")
