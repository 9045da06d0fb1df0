"""Read and decode every image of a data set, and tell what is in it and what is wrong with it."""

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..progress import Meter, Report, default_workers, in_order, silent
from .examine import PLAIN, Seen, examine, misnamed
from .stored import Place, Stored, stored_splits

_IMAGES_PER_TASK = 64
_DIGEST_BYTES = 16
#: Names listed of each kind that is out of the common; the rest are counted.
_LISTED = 1000
#: Processes pay from so many images on: the first starts after some five seconds.
MANY_IMAGES = 30_000

_Examined = tuple[int, bytes, Seen | str]


@dataclass(frozen=True)
class Spread:
    """The least, the median and the most of some numbers."""

    least: float
    median: float
    most: float


@dataclass(frozen=True)
class Finding:
    """Something about an image, a shard or a class.

    Attributes:
        name: its path; of an image in a shard the shard's path, a colon and the image's name.
        what: was found.
    """

    name: str
    what: str


@dataclass(frozen=True)
class Repeated:
    """Images that are the same byte by byte.

    Attributes:
        names: of the images.
        classes: that they are in, in order.
        splits: that they are in, in order.
    """

    names: list[str]
    classes: list[str]
    splits: list[str]


@dataclass
class SplitReport:
    """What a split holds.

    Attributes:
        name: of the split.
        format: ``folder``, or of its shards.
        images: found, with those that cannot be read.
        classes: how many.
        shards: how many; 0 for folders.
        bytes: of all encoded images.
        per_class: images per class.
        width: in pixels.
        height: in pixels.
        image_bytes: of one encoded image.
        kinds: how many images there are of each format and colour mode, most first.
        turned: images whose EXIF orientation is set.
    """

    name: str
    format: str
    images: int
    classes: int
    shards: int
    bytes: int = 0
    per_class: Spread | None = None
    width: Spread | None = None
    height: Spread | None = None
    image_bytes: Spread | None = None
    kinds: dict[str, int] = field(default_factory=dict)
    turned: int = 0


@dataclass
class DataReport:
    """What a data set holds, and what is wrong with it.

    Attributes:
        path: that was checked.
        splits: what each holds.
        corrupt: images that cannot be read or decoded, shards that are not what their index says,
            and classes that training would refuse. Any of these stops training.
        repeated: images that are there more than once. Across classes their labels contradict each
            other; across splits the evaluation knows them from training.
        misnamed: images whose extension is that of another format.
        unusual: images that decoders may differ on (CMYK, 16 bits, palettes, animations), of each
            kind the first thousand.
        turned: images whose EXIF orientation is set, the first thousand.
        others: files that are not images, and that training does not read.
    """

    path: str
    splits: list[SplitReport] = field(default_factory=list)
    corrupt: list[Finding] = field(default_factory=list)
    repeated: list[Repeated] = field(default_factory=list)
    misnamed: list[Finding] = field(default_factory=list)
    unusual: list[Finding] = field(default_factory=list)
    turned: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Whether nothing was found that would stop training."""
        return not self.corrupt

    def as_json(self) -> dict[str, Any]:
        """All of it, in what JSON can hold."""
        return {"usable": self.usable, **asdict(self)}


def check_data(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    processes: bool = False,
    report: Report = silent,
) -> DataReport:
    """Read and decode every image of a data set.

    Memory grows by about 250 bytes per image.

    Args:
        path: a folder with ``train`` and ``val``, or one of these, of class folders or of shards
            with their index.
        workers: how many work at once; default: one per core.
        processes: decode splits of :data:`MANY_IMAGES` and more in processes in place of threads,
            which is faster (on two cores 2.5 times for images of 32 × 32 pixels, an eighth for
            ImageNet's). The calling script must be one that can be imported.
        report: is told of progress.

    Raises:
        DataError: there is no data set at ``path``.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("Pillow is not installed: pip install 'largebatch[recipes]'") from error
    Image.preinit()  # before threads do
    splits = stored_splits(Path(path))
    found = DataReport(str(path))
    pool = _Workers(workers or default_workers(), processes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, on odd metadata
        rows = [_check_split(split, found, pool, report) for split in splits]
    found.corrupt += _unknown_classes(splits)
    found.repeated = _repeated(splits, rows)
    return found


class _Rows:
    """What is kept of each image of a split that was decoded."""

    def __init__(self) -> None:
        self.numbers = array("q")
        self.widths = array("q")
        self.heights = array("q")
        self.bytes = array("q")
        self.digests = bytearray()

    def add(self, number: int, seen: Seen, size: int, digest: bytes) -> None:
        self.numbers.append(number)
        self.widths.append(seen.width)
        self.heights.append(seen.height)
        self.bytes.append(size)
        self.digests += digest


def _check_split(split: Stored, found: DataReport, pool: _Workers, report: Report) -> _Rows:
    told = SplitReport(split.split, split.format, len(split), len(split.classes), len(split.shards))
    found.splits.append(told)
    found.corrupt += [Finding(name, what) for name, what in split.problems]
    found.others += split.others
    rows, kinds = _Rows(), Counter[str]()
    meter = Meter(report, f"checking {split.split}", len(split.numbers), split.total_bytes)
    for shards in meter.in_threads(split.check_shard, split.shards, pool.count):
        found.corrupt += [Finding(name, what) for name, what in shards]
    for numbers, batch in zip(_tasks(split), pool.examine(split, meter), strict=True):
        for number, (size, digest, seen) in zip(numbers, batch, strict=True):
            meter.add(1, size)
            told.bytes += size
            if isinstance(seen, str):
                found.corrupt.append(Finding(split.name(number), seen))
                continue
            rows.add(number, seen, size, digest)
            kinds[seen.kind] += 1
            if misnamed(split.file(number), seen.format):
                found.misnamed.append(Finding(split.name(number), f"it is {seen.format}"))
            if seen.kind not in PLAIN and kinds[seen.kind] <= _LISTED:
                found.unusual.append(Finding(split.name(number), seen.kind))
            if seen.turned:
                told.turned += 1
                if told.turned <= _LISTED:
                    found.turned.append(split.name(number))
    told.kinds = dict(kinds.most_common())
    told.per_class = _spread(np.bincount(split.labels, minlength=len(split.classes)))
    told.width, told.height = _spread(rows.widths), _spread(rows.heights)
    told.image_bytes = _spread(rows.bytes)
    return rows


def _tasks(split: Stored) -> Iterator[list[int]]:
    for first in range(0, len(split.numbers), _IMAGES_PER_TASK):
        yield split.numbers[first : first + _IMAGES_PER_TASK].tolist()


@dataclass(frozen=True)
class _Workers:
    """Threads or processes that decode."""

    count: int
    processes: bool

    def examine(self, split: Stored, meter: Meter) -> Iterator[list[_Examined]]:
        """What the images of each task are."""
        places = ([split.place(number) for number in numbers] for numbers in _tasks(split))
        if not self.processes or len(split.numbers) < MANY_IMAGES:
            yield from meter.in_threads(_examine, places, self.count)
            return
        # One server imports the library, and each process is forked from it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with ProcessPoolExecutor(self.count, context, initializer=_in_process) as pool:
            try:
                yield from in_order(pool, _examine, places, 2 * self.count)
            except BrokenProcessPool as error:
                raise DataError(f"a process that decodes {split.split} was killed") from error


def _in_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it is told
    warnings.simplefilter("ignore")


def _examine(places: list[Place]) -> list[_Examined]:
    """Bytes, checksum, and what each image is, or why it cannot be told."""
    found: list[_Examined] = []
    for place in places:
        content = b""
        seen: Seen | str
        try:
            content = place.read()
            seen = examine(content)
        except ValueError as error:
            seen = str(error)
        found.append((len(content), hashlib.sha256(content).digest()[:_DIGEST_BYTES], seen))
    return found


def _spread(values: Sequence[int] | NDArray[np.int64]) -> Spread | None:
    """None of nothing."""
    numbers = np.asarray(values)
    if not len(numbers):
        return None
    return Spread(float(numbers.min()), float(np.median(numbers)), float(numbers.max()))


def _unknown_classes(splits: list[Stored]) -> list[Finding]:
    """Classes to evaluate on that are not trained on."""
    known = {split.split: set(split.classes) for split in splits}
    if set(known) != {"train", "val"}:
        return []
    val = next(split for split in splits if split.split == "val")
    used = {val.classes[label] for label in np.unique(val.labels)}
    return [
        Finding(f"class {name} of val", "train has no such class")
        for name in sorted(used - known["train"])
    ]


def _repeated(splits: list[Stored], rows: list[_Rows]) -> list[Repeated]:
    """Groups of images of one checksum, in the order of their first."""
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
