"""Look at what lies on the disk after a data set was written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..progress import Meter, Report
from ..sources import INDEX, Index
from ..sources.storage.local import read_run
from .images import SIGNATURE_BYTES, Images, begins_as_image
from .workplace import Workplace


def finished(place: Workplace) -> dict[str, int] | None:
    """The number of images by split where the data set is there already, else None.

    Raises:
        DataError: a part of it is not there any more.
    """
    if place.result is None:
        return None
    counts = {}
    for split, told in place.result["splits"].items():
        folder = place.out / split
        again = f"remove {place.out} to make it again"
        try:
            if "shards" in told:
                where = folder / INDEX
                index = Index.load(where.read_bytes(), str(where))
                found = len(index)
                for name, size in zip(index.shards, index.shard_bytes, strict=True):
                    if (folder / name).stat().st_size != size:
                        raise DataError(f"{folder / name} has not {size:,} bytes: {again}")
            else:
                classes = [entry.path for entry in os.scandir(folder) if entry.is_dir()]
                found = sum(len(os.listdir(path)) for path in classes)
        except OSError as error:
            raise DataError(f"{error.filename}: {error.strerror}: {again}") from error
        if found != told["images"]:
            raise DataError(f"{folder} has {found:,} images, not {told['images']:,}: {again}")
        counts[split] = found
    return counts


def verify(folder: Path, images: Images, index: Index, report: Report) -> None:
    """Every image is where it should be, and nothing lies besides.

    Args:
        folder: of the split.
        images: that were to be written.
        index: of the files and images that were; that of shards is read again.
        report: is told of progress.

    Raises:
        DataError: something else lies there.
    """
    if index.format != "folder":
        index = Index.load((folder / INDEX).read_bytes(), str(folder / INDEX))
        beside = {INDEX, *(f"{Path(name).stem}.idx" for name in index.shards)}
        there = set(os.listdir(folder)) - beside
    else:
        there = {
            f"{entry.name}/{name}" for entry in os.scandir(folder) for name in os.listdir(entry)
        }
    wrong = sorted(there ^ set(index.shards))
    if wrong:
        raise DataError(
            f"{folder / wrong[0]} is {'in the way' if wrong[0] in there else 'gone again'}"
        )
    wanted = np.bincount(images.labels, minlength=len(images.classes))
    found = np.bincount(index.labels, minlength=len(images.classes))
    for number in np.flatnonzero(wanted != found)[:1]:
        raise DataError(
            f"{folder} has {found[number]} images of class {images.classes[number]}, "
            f"not {wanted[number]}"
        )
    meter = Meter(report, f"verifying {images.split}", len(index))
    by_shard = np.split(
        np.arange(len(index)), np.searchsorted(index.shard, range(1, len(index.shards)))
    )
    for name, size, numbers in zip(index.shards, index.shard_bytes, by_shard, strict=True):
        path = folder / name
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != size:
                raise DataError(f"{path} has not {size:,} bytes")
            for number in numbers.tolist():
                offset, length = int(index.offset[number]), int(index.length[number])
                head = read_run(file.fileno(), offset, min(length, SIGNATURE_BYTES), path)
                if not begins_as_image(head):
                    raise DataError(f"{path} has no image at byte {offset:,}")
            meter.add(len(numbers), 0)
