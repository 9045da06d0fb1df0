"""The audit of a data set: the faults that its sources report, and what decoding every image shows.

The sources are those of training, so that what they refuse here they refuse there.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decode.options import require_simplejpeg
from ..errors import DataError, printable
from ..progress import Meter, ProgressCallback, default_workers, silent
from ..sources import Encoded, ImageFolder, Shards
from ..sources.faults import Fault
from ..sources.shards.stale import stale_shards
from .examine import FORMAT_OF, PLAIN_KINDS, ImageInfo, examine
from .report import DataReport, Finding, Repeated, SplitReport, Spread
from .splits import open_splits, readable

_IMAGES_PER_TASK = 16
#: Number of names listed for each unusual kind of image; the rest are only counted.
_LISTED = 1000
# What is kept about each image that can be decoded.
_ROW = np.dtype(
    [(name, np.int64) for name in ("number", "width", "height", "bytes")] + [("digest", "V16")]
)

_Source = ImageFolder | Shards


def check_data(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    report: ProgressCallback = silent,
) -> DataReport:
    """Read and decode every image of a data set, and report its contents and faults.

    Memory grows by about 250 bytes per image.

    Args:
        path: A folder with ``train`` and ``val``, or one of these two, of class folders or of
            shards with their index.
        workers: Number of threads; default: one per core.
        report: Callback for the progress.

    Raises:
        DataError: There is no data set at ``path``, or Pillow or simplejpeg is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("Pillow is not installed: pip install 'largebatch[recipes]'") from error
    require_simplejpeg("data check")
    Image.preinit()  # before any thread does
    found = DataReport(printable(str(path)))
    splits = open_splits(Path(path), found.note)
    check = partial(_check, found, workers or default_workers(), report)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about odd metadata
        rows = [check(name, source) for name, source in splits.items()]
    found.repeated = _repeated([*splits.items()], rows)
    return found


def _check(
    found: DataReport, workers: int, report: ProgressCallback, split: str, source: _Source
) -> NDArray[Any]:
    numbers, shards = readable(source)
    summary = SplitReport(split, source.kind, len(source), len(source.classes), len(shards))
    found.splits.append(summary)
    kinds = Counter[str]()
    total = int(source.index.length[numbers].sum()) if isinstance(source, Shards) else None
    meter = Meter(report, f"checking {split}", len(numbers), total)
    if isinstance(source, Shards):
        known = {finding.name for finding in found.corrupt}
        whole = [shard for shard in shards if printable(source.where(shard)) not in known]
        for name, what in stale_shards(source.index, source.storage, whole, all_images=True):
            found.note(Fault(source.storage.where(name), what))

    def examined(task: NDArray[np.int64]) -> list[tuple[int, bytes, ImageInfo | str]]:
        return [_examine(content) for content in source.read(task)]

    tasks = np.split(numbers, range(_IMAGES_PER_TASK, len(numbers), _IMAGES_PER_TASK))
    images = chain.from_iterable(meter.in_threads(examined, tasks, workers))
    rows, usable = np.zeros(len(numbers), _ROW), 0
    for number, (size, digest, seen) in zip(numbers.tolist(), images, strict=True):
        meter.add(1, size)
        summary.bytes += size
        name = printable(source.name(number))
        if isinstance(seen, str):
            found.corrupt.append(Finding(name, printable(seen).removeprefix(name).strip()))
            continue
        rows[usable] = number, seen.width, seen.height, size, digest
        usable += 1
        kinds[seen.kind] += 1
        if seen.damage:
            summary.damaged += 1
            found.damaged.append(Finding(name, seen.damage))
        if seen.format != FORMAT_OF.get(name.rpartition(".")[2].lower(), seen.format):
            found.misnamed.append(Finding(name, f"it is {seen.format}"))
        if seen.kind not in PLAIN_KINDS and kinds[seen.kind] <= _LISTED:
            found.unusual.append(Finding(name, seen.kind))
        if seen.turned:
            summary.turned += 1
            found.turned += [name] if summary.turned <= _LISTED else []
    rows = rows[:usable]
    summary.kinds = dict(kinds.most_common())
    summary.per_class = Spread.of(np.bincount(source.labels, minlength=len(source.classes)))
    summary.width, summary.height = Spread.of(rows["width"]), Spread.of(rows["height"])
    summary.image_bytes = Spread.of(rows["bytes"])
    return rows


def _examine(content: Encoded | DataError) -> tuple[int, bytes, ImageInfo | str]:
    """Return size, checksum and facts of an image, or the reason why it cannot be used."""
    if isinstance(content, DataError):
        return 0, b"", str(content)
    try:
        seen: ImageInfo | str = examine(content)
    except ValueError as error:
        seen = str(error)
    return content.size, hashlib.sha256(content.data).digest()[: _ROW["digest"].itemsize], seen


def _repeated(splits: list[tuple[str, _Source]], rows: list[NDArray[Any]]) -> list[Repeated]:
    """Return groups of images with the same checksum, in the order of their first images."""
    which = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    row = np.concatenate(rows)
    _, group, sizes = np.unique(row["digest"], return_inverse=True, return_counts=True)
    found: dict[int, list[tuple[str, _Source, int]]] = {}
    for at in np.flatnonzero(sizes[group] > 1).tolist():
        found.setdefault(int(group[at]), []).append((*splits[which[at]], int(row["number"][at])))
    return [
        Repeated(
            names=[printable(source.name(n)) for _, source, n in same],
            classes=sorted({source.classes[source.labels[n]] for _, source, n in same}),
            splits=sorted({split for split, _, _ in same}),
        )
        for same in found.values()
    ]
