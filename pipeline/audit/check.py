"""The audit of a data set: every image is read and decoded, and faults are reported."""

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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..decode.options import require_simplejpeg
from ..errors import DataError
from ..progress import Meter, ProgressCallback, default_workers, in_order, silent
from .examine import PLAIN_KINDS, ImageInfo, examine, misnamed
from .report import DataReport, Finding, Repeated, SplitReport, Spread
from .stored import ImageLocation, StoredSplit, stored_splits

_IMAGES_PER_TASK = 64
_DIGEST_BYTES = 16
#: Number of names listed for each unusual kind of image; the rest are only counted.
_LISTED = 1000
#: Number of images in a split from which processes pay off, as they take a moment to start.
MANY_IMAGES = 30_000

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
            threads, which is faster (on two cores 2.5 times for images of 32 × 32 pixels, an
            eighth for ImageNet's). The calling script must be importable.
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
    splits = stored_splits(Path(path))
    found = DataReport(str(path))
    pool = _Workers(workers or default_workers(), processes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about odd metadata
        rows = [_check_split(split, found, pool, report) for split in splits]
    found.corrupt += _unknown_classes(splits)
    found.repeated = _repeated(splits, rows)
    return found


class _Rows:
    """The facts kept about each decoded image of a split."""

    def __init__(self) -> None:
        self.numbers = array("q")
        self.widths = array("q")
        self.heights = array("q")
        self.bytes = array("q")
        self.digests = bytearray()

    def add(self, number: int, seen: ImageInfo, size: int, digest: bytes) -> None:
        self.numbers.append(number)
        self.widths.append(seen.width)
        self.heights.append(seen.height)
        self.bytes.append(size)
        self.digests += digest


def _check_split(
    split: StoredSplit, found: DataReport, pool: _Workers, report: ProgressCallback
) -> _Rows:
    summary = SplitReport(
        split.split, split.format, len(split), len(split.classes), len(split.shards)
    )
    found.splits.append(summary)
    found.corrupt += [Finding(name, what) for name, what in split.problems]
    found.others += split.others
    rows, kinds = _Rows(), Counter[str]()
    meter = Meter(report, f"checking {split.split}", len(split.numbers), split.total_bytes)
    for faults in meter.in_threads(split.check_shard, split.shards, pool.count):
        found.corrupt += [Finding(name, what) for name, what in faults]
    found.corrupt += [Finding(name, what) for name, what in split.stale_shards()]
    for numbers, batch in zip(_tasks(split), pool.examine(split, meter), strict=True):
        for number, (size, digest, seen) in zip(numbers, batch, strict=True):
            meter.add(1, size)
            summary.bytes += size
            if isinstance(seen, str):
                found.corrupt.append(Finding(split.name(number), seen))
                continue
            rows.add(number, seen, size, digest)
            kinds[seen.kind] += 1
            if seen.damage:
                summary.damaged += 1
                found.damaged.append(Finding(split.name(number), seen.damage))
            if misnamed(split.file(number), seen.format):
                found.misnamed.append(Finding(split.name(number), f"it is {seen.format}"))
            if seen.kind not in PLAIN_KINDS and kinds[seen.kind] <= _LISTED:
                found.unusual.append(Finding(split.name(number), seen.kind))
            if seen.turned:
                summary.turned += 1
                if summary.turned <= _LISTED:
                    found.turned.append(split.name(number))
    summary.kinds = dict(kinds.most_common())
    summary.per_class = _spread(np.bincount(split.labels, minlength=len(split.classes)))
    summary.width, summary.height = _spread(rows.widths), _spread(rows.heights)
    summary.image_bytes = _spread(rows.bytes)
    return rows


def _tasks(split: StoredSplit) -> Iterator[list[int]]:
    for first in range(0, len(split.numbers), _IMAGES_PER_TASK):
        yield split.numbers[first : first + _IMAGES_PER_TASK].tolist()


@dataclass(frozen=True)
class _Workers:
    """The threads or processes that decode."""

    count: int
    processes: bool

    def examine(self, split: StoredSplit, meter: Meter) -> Iterator[list[_Examined]]:
        """Yield the decoded facts of the images of each task."""
        places = ([split.location(number) for number in numbers] for numbers in _tasks(split))
        if not self.processes or len(split.numbers) < MANY_IMAGES:
            yield from meter.in_threads(_examine, places, self.count)
            return
        # A server process imports the library once, and each worker is forked from it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with ProcessPoolExecutor(self.count, context, initializer=_in_process) as pool:
            try:
                yield from in_order(pool, _examine, places, 2 * self.count)
            except BrokenProcessPool as error:
                raise DataError(f"a process that decoded {split.split} was killed") from error


def _in_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    warnings.simplefilter("ignore")


def _examine(places: list[ImageLocation]) -> list[_Examined]:
    """Return size, checksum and facts of each image, or the reason why it cannot be decoded."""
    found: list[_Examined] = []
    for place in places:
        content = b""
        seen: ImageInfo | str
        try:
            content = place.read()
            seen = examine(content)
        except ValueError as error:
            seen = str(error)
        found.append((len(content), hashlib.sha256(content).digest()[:_DIGEST_BYTES], seen))
    return found


def _spread(values: Sequence[int] | NDArray[np.int64]) -> Spread | None:
    """Return the spread of values; None if there are none."""
    numbers = np.asarray(values)
    if not len(numbers):
        return None
    return Spread(float(numbers.min()), float(np.median(numbers)), float(numbers.max()))


def _unknown_classes(splits: list[StoredSplit]) -> list[Finding]:
    """Return the classes of val that train does not have."""
    known = {split.split: set(split.classes) for split in splits}
    if set(known) != {"train", "val"}:
        return []
    val = next(split for split in splits if split.split == "val")
    used = {val.classes[label] for label in np.unique(val.labels)}
    return [
        Finding(f"class {name} of val", "train has no such class")
        for name in sorted(used - known["train"])
    ]


def _repeated(splits: list[StoredSplit], rows: list[_Rows]) -> list[Repeated]:
    """Return groups of images with the same checksum, in the order of their first images."""
    digests = np.frombuffer(b"".join(bytes(row.digests) for row in rows), np.uint64)
    digests = digests.reshape(-1, _DIGEST_BYTES // 8)
    if not len(digests):
        return []
    ends = np.cumsum([len(row.numbers) for row in rows])
    order = np.lexsort(digests.T)
    changes = np.any(digests[order][1:] != digests[order][:-1], axis=1)
    starts = np.flatnonzero(np.concatenate([[True], changes]))
    sizes = np.diff(np.append(starts, len(order)))
    several = sizes > 1
    groups = [
        np.sort(order[start : start + size])
        for start, size in zip(starts[several], sizes[several], strict=True)
    ]
    found = []
    for group in sorted(groups, key=lambda g: int(g[0])):
        places = []
        for at in group.tolist():
            which = int(np.searchsorted(ends, at, side="right"))
            places.append((splits[which], rows[which].numbers[at - int(ends[which])]))
        found.append(
            Repeated(
                names=[split.name(number) for split, number in places],
                classes=sorted({split.classes[split.labels[n]] for split, n in places}),
                splits=sorted({split.split for split, _ in places}),
            )
        )
    return found
