"""Images in class folders, packed into shards or made smaller."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..progress import Meter, ProgressCallback, silent
from ..sources import ImageFolder
from .build import build
from .images import Images
from .output import Output
from .verify import finished_counts
from .work_dir import WorkDir

_BLOCK = 1000


def prepare_folder(
    out: str | os.PathLike[str],
    source: str | os.PathLike[str],
    output: Output,
    report: ProgressCallback = silent,
) -> dict[str, int]:
    """Write a copy of ``source/train/<class>/`` and ``source/val/<class>/`` in another format.

    Either split may be missing. The source is not changed.

    Args:
        out: The folder to create. If it already holds the data set, nothing is written.
        source: The folder to read.
        output: The format to write: shards, or smaller images.
        report: Callback for the progress.

    Returns:
        The number of images by split.

    Raises:
        DataError: ``out`` holds something else or cannot be created, a file cannot be read or is
            not an image, or there is nothing to do.
    """
    source = Path(source)
    if not output.sharded and output.resize is None:
        raise DataError(
            "nothing to do: the output would be the same folders; valid: --format or --resize"
        )
    names = [split for split in ("train", "val") if (source / split).is_dir()]
    if not names:
        raise DataError(
            f"--source: {source} has neither a folder train nor val; valid: a folder with "
            "train/<class>/<image>.jpeg, val/<class>/<image>.jpeg"
        )
    settings = {"data set": "folder", "splits": " ".join(names), **output.settings()}
    with WorkDir(out, settings) as work_dir:
        found: list[ImageFolder] = []
        for split in names:
            found.append(ImageFolder(source, split, found[0].classes if found else None))
        splits = [_images(folder, report) for folder in found]
        for images in splits:
            work_dir.check_source(images.split, images.fingerprint())
        return finished_counts(work_dir) or build(work_dir, splits, output, report)


def _images(folder: ImageFolder, report: ProgressCallback) -> Images:
    paths = [folder.name(number) for number in range(len(folder))]

    def read(number: int) -> bytes:
        try:
            with open(paths[number], "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise DataError(f"{paths[number]} cannot be read: {error.strerror}") from error

    split = folder.folder.name
    return Images(
        split,
        folder.classes,
        ["/".join(path.rsplit("/", 2)[1:]) for path in paths],
        folder.labels,
        _sizes(paths, Meter(report, f"listing {split}", len(paths))),
        read,
    )


def _sizes(paths: list[str], meter: Meter) -> NDArray[np.int64]:
    sizes = []
    for first in range(0, len(paths), _BLOCK):
        block = paths[first : first + _BLOCK]
        try:
            sizes += [os.stat(path).st_size for path in block]
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
        meter.add(len(block), 0)
    return np.array(sizes, np.int64)
