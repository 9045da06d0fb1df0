"""The audit of a data set: the faults that its sources report, and what decoding every image shows.

The sources are those of training, so that what they refuse here they refuse there.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import warnings
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..decode.options import require_simplejpeg
from ..errors import DataError, printable
from ..progress import Meter, ProgressCallback, default_workers, in_order, silent
from ..sources import Encoded, ImageFolder, Shards
from ..sources.faults import Fault
from ..sources.shards.stale import stale_shards
from .examine import PLAIN_KINDS, ImageInfo, examine, misnamed
from .report import DataReport, Finding, Repeated, SplitReport, Spread
from .splits import checksum_fault, open_splits, readable

_IMAGES_PER_TASK = 16
_DIGEST_BYTES = 16
#: Number of names listed for each unusual kind of image; the rest are only counted.
_LISTED = 1000
#: Number of images in a split from which processes pay off, as they take a moment to start.
MANY_IMAGES = 30_000

_Source = ImageFolder | Shards
_Examined = tuple[int, bytes, ImageInfo | str]


def check_data(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    processes: bool = False,
    report: ProgressCallback = silent,
) -> DataReport:
    """Read and decode every image of a data set, and report its contents and faults.

    Memory grows by about 250 bytes per image.

    Args:
        path: A folder with ``train`` and ``val``, or one of these two, of class folders or of
            shards with their index.
        workers: Number of concurrent workers; default: one per core.
        processes: Decode splits of at least :data:`MANY_IMAGES` images in processes instead of
            threads, which is faster for small images. The calling script must be importable.
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
    check = partial(_check, found, workers or default_workers(), processes, report)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about odd metadata
        rows = [check(name, source) for name, source in splits.items()]
    found.repeated = _repeated([*splits.items()], rows)
    return found


class _Rows:
    """The facts kept about each decoded image of a split."""

    def __init__(self) -> None:
        self.numbers, self.widths, self.heights, self.bytes = (array("q") for _ in range(4))
        self.digests = bytearray()

    def add(self, number: int, seen: ImageInfo, size: int, digest: bytes) -> None:
        self.numbers.append(number)
        self.widths.append(seen.width)
        self.heights.append(seen.height)
        self.bytes.append(size)
        self.digests += digest


def _check(
    found: DataReport,
    workers: int,
    processes: bool,
    report: ProgressCallback,
    split: str,
    source: _Source,
) -> _Rows:
    numbers, shards = readable(source)
    summary = SplitReport(split, source.kind, len(source), len(source.classes), len(shards))
    found.splits.append(summary)
    rows, kinds = _Rows(), Counter[str]()
    total = int(source.index.length[numbers].sum()) if isinstance(source, Shards) else None
    meter = Meter(report, f"checking {split}", len(numbers), total)
    if isinstance(source, Shards):
        for fault in meter.in_threads(partial(checksum_fault, source), shards, workers):
            if fault:
                found.note(fault)
        known = {finding.name for finding in found.corrupt}
        whole = [shard for shard in shards if printable(source.where(shard)) not in known]
        for name, what in stale_shards(source.index, source.storage, whole, all_images=True):
            found.note(Fault(source.storage.where(name), what))
    tasks = np.split(numbers, range(_IMAGES_PER_TASK, len(numbers), _IMAGES_PER_TASK))
    batches = _examined(source, tasks, meter, workers, processes and len(numbers) >= MANY_IMAGES)
    for number, (size, digest, seen) in zip(numbers.tolist(), batches, strict=True):
        meter.add(1, size)
        summary.bytes += size
        name = printable(source.name(number))
        if isinstance(seen, str):
            found.corrupt.append(Finding(name, printable(seen).removeprefix(name).strip()))
            continue
        rows.add(number, seen, size, digest)
        kinds[seen.kind] += 1
        if seen.damage:
            summary.damaged += 1
            found.damaged.append(Finding(name, seen.damage))
        if misnamed(name, seen.format):
            found.misnamed.append(Finding(name, f"it is {seen.format}"))
        if seen.kind not in PLAIN_KINDS and kinds[seen.kind] <= _LISTED:
            found.unusual.append(Finding(name, seen.kind))
        if seen.turned:
            summary.turned += 1
            found.turned += [name] if summary.turned <= _LISTED else []
    summary.kinds = dict(kinds.most_common())
    summary.per_class = _spread(np.bincount(source.labels, minlength=len(source.classes)))
    summary.width, summary.height = _spread(rows.widths), _spread(rows.heights)
    summary.image_bytes = _spread(rows.bytes)
    return rows


def _examined(
    source: _Source, tasks: list[NDArray[np.int64]], meter: Meter, workers: int, processes: bool
) -> Iterator[_Examined]:
    """Yield the decoded facts of each image, read in threads and decoded there or in processes."""
    if not processes:
        for batch in meter.in_threads(lambda task: _examine(source.read(task)), tasks, workers):
            yield from batch
        return
    # A server process imports the library once, and each worker is forked from it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    contents = meter.in_threads(source.read, tasks, workers)
    with ProcessPoolExecutor(workers, context, initializer=_in_process) as pool:
        try:
            for batch in in_order(pool, _examine, contents, 2 * workers):
                yield from batch
        except BrokenProcessPool as error:
            raise DataError("a process that decoded images was killed") from error


def _in_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    warnings.simplefilter("ignore")


def _examine(contents: list[Encoded | DataError]) -> list[_Examined]:
    """Return size, checksum and facts of each image, or the reason why it cannot be used."""
    found: list[_Examined] = []
    for content in contents:
        if isinstance(content, DataError):
            found.append((0, b"", printable(str(content))))
            continue
        seen: ImageInfo | str
        try:
            seen = examine(content)
        except ValueError as error:
            seen = str(error)
        found.append((content.size, hashlib.sha256(content.data).digest()[:_DIGEST_BYTES], seen))
    return found


def _spread(values: Sequence[int] | NDArray[np.int64]) -> Spread | None:
    """Return the spread of values; None if there are none."""
    numbers = np.asarray(values)
    if not len(numbers):
        return None
    return Spread(float(numbers.min()), float(np.median(numbers)), float(numbers.max()))


def _repeated(splits: list[tuple[str, _Source]], rows: list[_Rows]) -> list[Repeated]:
    """Return groups of images with the same checksum, in the order of their first images."""
    digests = np.frombuffer(b"".join(bytes(row.digests) for row in rows), f"V{_DIGEST_BYTES}")
    which = np.repeat(np.arange(len(rows)), [len(row.numbers) for row in rows])
    number = np.concatenate([np.array(row.numbers, np.int64) for row in rows])
    _, group, sizes = np.unique(digests, return_inverse=True, return_counts=True)
    found: dict[int, list[tuple[str, _Source, int]]] = {}
    for at in np.flatnonzero(sizes[group] > 1).tolist():
        found.setdefault(int(group[at]), []).append((*splits[which[at]], int(number[at])))
    return [
        Repeated(
            names=[printable(source.name(n)) for _, source, n in same],
            classes=sorted({source.classes[source.labels[n]] for _, source, n in same}),
            splits=sorted({split for split, _, _ in same}),
        )
        for same in found.values()
    ]
