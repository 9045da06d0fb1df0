"""Images in class folders, packed into shards or made smaller."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..progress import Meter, ProgressCallback, silent
from ..sources import ImageFolder, OnFault
from ..sources.faults import refuse
from .images import Images
from .output import Output
from .preparation import preparing
from .write import build


def prepare_folder(
    out: str | os.PathLike[str],
    source: str | os.PathLike[str],
    output: Output,
    report: ProgressCallback = silent,
    on_fault: OnFault = refuse,
) -> dict[str, int]:
    """Write a copy of ``source/train/<class>/`` and ``source/val/<class>/`` in another format.

    Either split may be missing. The source is not changed. Other arguments, the result and errors
    are as of :func:`prepare_imagenet`.

    Args:
        source: The folder to read.
        output: The format to write: shards, or smaller images.
        on_fault: Called with each fault of the source; the default raises for those that stop
            training, and nothing is said of what is left out.
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
    with preparing(out, settings) as preparation:
        found: list[ImageFolder] = []
        for split in names:
            found.append(ImageFolder(source, split, found[0].classes if found else None, on_fault))
        splits = [_images(folder, report) for folder in found]
        preparation.check_source(splits)
        return preparation.finished_counts() or build(preparation, splits, output, report)


def _images(folder: ImageFolder, report: ProgressCallback) -> Images:
    split = folder.folder.name
    names = [folder.name(number) for number in range(len(folder))]
    meter = Meter(report, f"listing {split}", len(names))
    sizes = []
    for number, name in enumerate(names):
        try:
            sizes.append(os.stat(folder.path(number)).st_size)
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error.strerror}") from error
        meter.add(1, 0)

    def read(number: int) -> bytes:
        (content,) = folder.read(np.array([number]))
        if isinstance(content, DataError):
            raise content
        return content.tobytes()

    return Images(
        split,
        folder.classes,
        ["/".join(name.rsplit("/", 2)[1:]) for name in names],
        folder.labels,
        np.array(sizes, np.int64),
        read,
    )
