"""The command ``largebatch data index``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import RecipeError


def data_index(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Shards of one split, such as DIR/train.")
    ],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="webdataset, tfrecord or recordio; default: guessed from the file names.",
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB",
            help="Files that are shards: '*.tar', 'train-{00000..01023}-of-01024'; default: all "
            "files with the name of a shard.",
        ),
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Class names, one per line in the order of their labels; default: those stored "
            "in the shards, else the labels.",
        ),
    ] = None,
    label_offset: Annotated[
        int,
        typer.Option(
            min=0, help="Label of the first class: 1 in TensorFlow's own conversion of ImageNet."
        ),
    ] = 0,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Add the CRC-32 of each image; reads all of them.")
    ] = False,
) -> None:
    """Write an index beside shards made by other tools.

    The file index.npz holds the position of each image. Without it, shards are scanned at every
    start of training; shards on a server must have it.
    """
    from ...pipeline import INDEX_FILE, DataError, Progress, index_shards
    from .data_progress import Bar

    with Bar() as bar:

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
    if found.unused_classes:
        print(f"{folder}: {found.unused_classes}")


def _names(path: Path) -> tuple[str, ...]:
    """The lines of a file."""
    try:
        return tuple(path.read_text().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--classes: {path} cannot be read: {error}") from error
