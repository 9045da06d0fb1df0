"""The splits of a data set on disk, opened by the sources that training reads them with."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..sources import INDEX_FILE, ImageFolder, Index, Shards
from ..sources.faults import OTHER, Fault, OnFault

_SHARDS = (".tar", ".tfrecord", ".rec")


def open_splits(path: Path, on_fault: OnFault) -> dict[str, ImageFolder | Shards]:
    """Open the splits of the data set at ``path``, or ``path`` itself as the only split."""
    if not path.is_dir():
        raise DataError(f"no folder {path}; valid: a data set, or its folder train or val")
    names = [name for name in ("train", "val") if os.path.lexists(path / name)]
    root = path if names else path.parent
    found: dict[str, ImageFolder | Shards] = {}
    classes = None
    for name in names or [path.name]:
        if not (root / name).is_dir():
            on_fault(Fault(str(root / name), "is no folder"))
            continue
        source = _open(root, name, classes, on_fault)
        classes, found[name] = source.classes, source
    if not found or not (names or len(found[path.name])):
        raise DataError(
            f"{path} holds no data set; valid: train/<class>/<image>.jpeg and "
            f"val/<class>/<image>.jpeg, or shards with their {INDEX_FILE} in train and val"
        )
    return found


def _open(
    root: Path, split: str, classes: tuple[str, ...] | None, on_fault: OnFault
) -> ImageFolder | Shards:
    folder = root / split
    index = folder / INDEX_FILE
    if index.is_file():
        form = Index.load(index.read_bytes(), str(index)).format
        source = Shards(root, split, format=form, classes=classes, on_fault=on_fault)
        known = {INDEX_FILE, *source.index.shards}
        known |= {f"{Path(name).stem}.idx" for name in source.index.shards}
        for name in sorted(set(os.listdir(folder)) - known):
            on_fault(Fault(str(folder / name), "is not in the index", OTHER))
        return source
    shards = [p for p in folder.glob("*") if p.suffix in _SHARDS]
    if shards and not any(p.is_dir() for p in folder.glob("*")):
        raise DataError(
            f"{folder} has shards, such as {shards[0].name}, but no {INDEX_FILE}: "
            f"write it with largebatch data index {folder}"
        )
    return ImageFolder(root, split, classes, on_fault)


def readable(source: ImageFolder | Shards) -> tuple[NDArray[np.int64], list[int]]:
    """Return the numbers of the images whose shard exists, int64, and of the shards that do."""
    if isinstance(source, ImageFolder):
        return np.arange(len(source)), []
    there = np.array([os.path.exists(source.where(n)) for n in range(len(source.index.shards))])
    return np.flatnonzero(there[source.index.shard]), np.flatnonzero(there).tolist()
