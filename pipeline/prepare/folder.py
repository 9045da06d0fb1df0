"""Images in class folders: divided into splits, packed into shards or made smaller."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..order import epoch_order
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
    *,
    split: float | None = None,
) -> dict[str, int]:
    """Write ``source/train/<class>/`` and ``source/val/<class>/`` in another format, or divided.

    Either split may be missing. The source is not changed. Other arguments, the result and errors
    are as of :func:`prepare_imagenet`.

    Args:
        source: The folder to read.
        output: The format to write. With ``split``, folders of images of their own size are hard
            links to those of the source, or copies where the file system has no such links.
        split: Share of each class, at least an image, that becomes ``val``, drawn by the seed of
            ``output``; the others are ``train``. The source is then ``source/<class>/``, or
            ``source/train/<class>/`` without ``val``. None leaves the splits as they are.
        on_fault: Called with each fault of the source; the default raises for those that stop
            training, and nothing is said of what is left out.
    """
    source = Path(source)
    if split is None and not output.sharded and output.resize is None:
        raise DataError(
            "nothing to do: the output would be the same folders; valid: --split, --format or "
            "--resize"
        )
    names = [name for name in ("train", "val") if (source / name).is_dir()]
    settings = {"data set": "folder", "splits": " ".join(names), **output.settings()}
    if split is not None:
        settings |= {"split": split, "seed": output.seed}
        if not 0 < split < 1:
            raise DataError(f"--split: {split:g} is no share; valid: above 0 and below 1")
        if "val" in names:
            raise DataError(f"--split: {source} has val/ already; valid: without --split")
        names = names or [""]  # the class folders are in the source itself
    elif not names:
        raise DataError(
            f"SRC: {source} has neither a folder train nor val; valid: a folder with "
            "train/<class>/<image>.jpeg, val/<class>/<image>.jpeg, or --split 0.1 for one with "
            "<class>/<image>.jpeg"
        )
    with preparing(out, settings) as preparation:
        found: list[ImageFolder] = []
        for name in names:
            found.append(ImageFolder(source, name, found[0].classes if found else None, on_fault))
        splits = [
            _images(folder, name or "train", report)
            for folder, name in zip(found, names, strict=True)
        ]
        if split is not None:
            splits = _divided(splits[0], split, output.seed)
        preparation.check_source(splits)
        return preparation.finished_counts() or build(preparation, splits, output, report)


def _divided(images: Images, share: float, seed: int) -> list[Images]:
    """Draw a share of each class for ``val``; the others are ``train``."""
    drawn = np.zeros(len(images), bool)
    for label, name in enumerate(images.classes):
        numbers = np.flatnonzero(images.labels == label)
        if len(numbers) < 2:
            raise DataError(f"--split: class {name!r} has 1 image; valid: 2 or more in each class")
        count = min(max(1, round(share * len(numbers))), len(numbers) - 1)
        drawn[numbers[epoch_order(len(numbers), seed, label)[:count]]] = True
    parts = {"train": ~drawn, "val": drawn}
    return [images.part(name, np.flatnonzero(chosen)) for name, chosen in parts.items()]


def _images(folder: ImageFolder, split: str, report: ProgressCallback) -> Images:
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
        folder.path,
    )
