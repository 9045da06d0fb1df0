"""Verification of a data set on disk, after it has been written and on later calls."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..progress import Meter, ProgressCallback
from ..sources import INDEX_FILE, Index
from ..sources.storage.local import read_range
from .images import SIGNATURE_BYTES, Images, has_image_signature
from .work_dir import WorkDir


def finished_counts(work_dir: WorkDir) -> dict[str, int] | None:
    """Return the number of images by split if the data set is complete, None if unfinished.

    Raises:
        DataError: A part of the finished data set is missing.
    """
    if work_dir.result is None:
        return None
    counts = {}
    for split, expected in work_dir.result["splits"].items():
        folder = work_dir.out / split
        advice = f"remove {work_dir.out} to write it again"
        try:
            if "shards" in expected:
                where = folder / INDEX_FILE
                index = Index.load(where.read_bytes(), str(where))
                found = len(index)
                for name, size in zip(index.shards, index.shard_bytes, strict=True):
                    if (folder / name).stat().st_size != size:
                        raise DataError(f"{folder / name} does not have {size:,} bytes: {advice}")
            else:
                classes = [entry.path for entry in os.scandir(folder) if entry.is_dir()]
                found = sum(len(os.listdir(path)) for path in classes)
        except OSError as error:
            raise DataError(f"{error.filename}: {error.strerror}: {advice}") from error
        if found != expected["images"]:
            raise DataError(f"{folder} has {found:,} images, not {expected['images']:,}: {advice}")
        counts[split] = found
    return counts


def verify(folder: Path, images: Images, index: Index, report: ProgressCallback) -> None:
    """Check that a split holds exactly its images: the files, the classes and the signatures.

    Args:
        folder: The folder of the split.
        images: The images that were to be written.
        index: Index of the files and images that were written; for shards it is read from disk.
        report: Callback for the progress.

    Raises:
        DataError: A file is missing, unexpected, or not as written.
    """
    if index.format != "folder":
        index = Index.load((folder / INDEX_FILE).read_bytes(), str(folder / INDEX_FILE))
        beside = {INDEX_FILE, *(f"{Path(name).stem}.idx" for name in index.shards)}
        there = set(os.listdir(folder)) - beside
    else:
        there = {
            f"{entry.name}/{name}" for entry in os.scandir(folder) for name in os.listdir(entry)
        }
    wrong = sorted(there ^ set(index.shards))
    if wrong:
        raise DataError(
            f"{folder / wrong[0]} {'is not part of it' if wrong[0] in there else 'has vanished'}"
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
                raise DataError(f"{path} does not have {size:,} bytes")
            for number in numbers.tolist():
                offset, length = int(index.offset[number]), int(index.length[number])
                head = read_range(file.fileno(), offset, min(length, SIGNATURE_BYTES), path)
                if not has_image_signature(head):
                    raise DataError(f"{path} has no image at byte {offset:,}")
            meter.add(len(numbers), 0)
