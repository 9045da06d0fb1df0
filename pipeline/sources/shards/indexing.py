"""Building the index of a folder of shards by scanning them."""

from __future__ import annotations

import glob
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..storage.local import LocalStorage
from . import recordio, tfrecord, webdataset
from .index import Index
from .shard_file import Entry, ShardFile

#: Shard formats, and the function that yields the images of a :class:`ShardFile` in order: those
#: after byte ``start``, the end of an image. With ``verify`` it checks the format's checksums.
SCANNERS: dict[str, Callable[..., Iterator[Entry]]] = {
    "webdataset": webdataset.scan,
    "tfrecord": tfrecord.scan,
    "recordio": recordio.scan,
}

_NAMES = {
    "webdataset": re.compile(r".*\.tar"),
    "tfrecord": re.compile(r".*\.tfrecords?|.*-\d+-of-\d+"),
    "recordio": re.compile(r".*\.rec"),
}
_NUMBERED = re.compile(r"(.*?)(\d+)-of-(\d+)(.*)")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_ENTRIES_PER_REPORT = 1000
# Some file systems store times in units of two seconds.
_TICK_NS = 2 * 10**9
# Larger labels are ids. Data sets of faces have up to two million classes.
_MOST_CLASSES = 2**31
_CLASSES_OF_FEW_LABELS = 100_000


def index_shards(
    folder: str | os.PathLike[str],
    format: str | None = None,
    *,
    pattern: str | None = None,
    classes: tuple[str, ...] | None = None,
    label_offset: int = 0,
    checksums: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Index:
    """Scan the shards of a local folder and return their index.

    ``index_shards(folder).save(folder / INDEX_FILE)`` makes them ready for :class:`Shards`.

    Args:
        folder: Folder of the shards of one split.
        format: ``webdataset``, ``tfrecord`` or ``recordio``; by default inferred from the names
            of the files.
        pattern: Names of the shards relative to the folder, with ``*``, ``?`` and ``[]`` as in a
            shell, and ranges such as ``{000..127}``; by default all files with the usual names.
        classes: Class names, by class number; by default those stored in the shards (TFRecord's
            ``image/class/synset``), else the class numbers.
        label_offset: Label of the first class in the shards: 1 for the TFRecord files of ImageNet
            made with TensorFlow's own script.
        checksums: Whether to compute the CRC-32 of each image, and to verify the checksums of
            TFRecord records; this reads all bytes.
        progress: Callback for the number of bytes processed so far and in all.

    Raises:
        DataError: There are no shards, some are missing, a shard cannot be read or is damaged, or
            a label does not fit the classes.
    """
    folder = Path(folder)
    shards, format = find_shards(folder, format, pattern)
    storage = LocalStorage(folder)
    times = change_times(storage, shards)
    # A shard that was just written could be changed again without another time.
    times[times > time.time_ns() - _TICK_NS] = -1
    files = [ShardFile(storage, name) for name in shards]
    done, total = 0, sum(file.size for file in files) * (2 if checksums else 1)
    report = progress or (lambda done, total: None)
    entries: list[Entry] = []
    shard: list[int] = []
    crc32: list[int] = []
    for number, file in enumerate(files):
        before = len(entries)
        for entry in SCANNERS[format](file, verify=checksums):
            _check_label(f"{file.where}:{entry.name}", entry.label, label_offset)
            entries.append(entry)
            if len(entries) % _ENTRIES_PER_REPORT == 0:
                report(done + entry.offset, total)
        found = entries[before:]
        if not found:
            raise DataError(f"{file.where} holds no images: remove it, or write it again")
        shard += [number] * len(found)
        report(done := done + file.size, total)
        if checksums:
            crc32 += [zlib.crc32(file.at(entry.offset, entry.length)) for entry in found]
            report(done := done + file.size, total)
    labels = np.array([entry.label for entry in entries], dtype=np.int64) - label_offset

    def name_of(image: int) -> str:
        return f"{files[shard[image]].where}:{entries[image].name}"

    names = [entry.class_name for entry in entries]
    return Index(
        format=format,
        classes=_classes(labels, names, classes, label_offset, name_of),
        shards=tuple(shards),
        shard_bytes=np.array([file.size for file in files], dtype=np.int64),
        names=tuple(entry.name for entry in entries),
        labels=labels,
        shard=np.array(shard, dtype=np.int64),
        offset=np.array([entry.offset for entry in entries], dtype=np.int64),
        length=np.array([entry.length for entry in entries], dtype=np.int64),
        split=np.array([entry.split for entry in entries], dtype=np.bool_),
        shard_times=times,
        label_offset=np.array(label_offset),
        crc32=np.array(crc32, dtype=np.uint32) if checksums else None,
    )


def change_times(storage: LocalStorage, shards: Sequence[str]) -> NDArray[np.int64]:
    """Return when shards were last changed, in nanoseconds since 1970; -1 where this is unknown."""
    times = []
    for shard in shards:
        try:
            times.append(os.stat(storage.where(shard)).st_mtime_ns)
        except OSError:
            times.append(-1)
    return np.array(times, dtype=np.int64)


def find_shards(folder: Path, format: str | None, pattern: str | None) -> tuple[list[str], str]:
    """Return the shards of a folder in the order of their names, and their format."""
    if format is not None and format not in SCANNERS:
        raise DataError(f"unknown shard format {format!r}; valid: {', '.join(SCANNERS)}")
    if pattern is not None:
        shards = _matching(folder, pattern)
    else:
        try:
            shards = sorted(e.name for e in os.scandir(folder) if not e.name.startswith("."))
        except OSError as error:
            raise DataError(f"{folder} cannot be read: {error.strerror}") from error
    found: dict[str, list[str]] = {}
    for shard in shards:
        for name, names in _NAMES.items():
            if names.fullmatch(shard.lower()):
                found.setdefault(name, []).append(shard)
    if format is None:
        if len(found) > 1:
            two = " and ".join(f"{shards[0]} ({name})" for name, shards in found.items())
            raise DataError(f"{folder} has shards of several formats: {two}; choose one")
        format = next(iter(found), None)
    if format is None or (pattern is None and format not in found):
        raise DataError(
            f"{folder} has no {f'{format} ' if format else ''}shards; valid: files *.tar "
            "(webdataset), *.tfrecord or *-00000-of-01024 (tfrecord), or *.rec (recordio)"
        )
    if pattern is None:
        shards = found[format]
    if pattern is None or "*" in pattern:
        _check_complete(folder, shards)
    return shards, format


def _check_complete(folder: Path, shards: Sequence[str]) -> None:
    """Refuse shards named ``...-00000-of-00003`` if they are not one whole set."""
    sets: dict[str, dict[int, set[int]]] = {}
    for shard in shards:
        found = _NUMBERED.fullmatch(shard)
        if found:
            series = sets.setdefault(f"{found[1]}*{found[4]}", {})
            series.setdefault(int(found[3]), set()).add(int(found[2]))
    advice = "if this is meant, use a pattern without *, such as train-0000[02]-of-00003"
    for name, series in sets.items():
        if len(series) > 1:
            counts = " and ".join(f"{count:,}" for count in sorted(series))
            raise DataError(
                f"{folder / name} are shards of several sets, of {counts}: remove those of one, or "
                "name those of the other by a pattern such as *-of-00003"
            )
        ((count, numbers),) = series.items()
        first = int(0 not in numbers and count in numbers)
        wanted = range(first, first + count)
        missing = list(islice((number for number in wanted if number not in numbers), 5))
        if missing:
            lost = count - sum(number in wanted for number in numbers)
            raise DataError(
                f"{folder / name}: {lost:,} of {count:,} shards are missing: number "
                f"{', '.join(map(str, missing))}{', ...' * (lost > len(missing))}; {advice}"
            )


def _matching(folder: Path, pattern: str) -> list[str]:
    shards: list[str] = []
    for one in _expand(pattern):
        if glob.has_magic(one):
            shards += sorted(glob.glob(one, root_dir=folder))
        elif (folder / one).is_file():
            shards.append(one)
        else:
            raise DataError(f"{folder / one} of the pattern {pattern} does not exist")
    shards = [shard for shard in dict.fromkeys(shards) if not shard.endswith((".idx", ".npz"))]
    if not shards:
        raise DataError(f"no file in {folder} matches the pattern {pattern}")
    return shards


def _expand(pattern: str) -> Iterator[str]:
    """Expand the number ranges of a pattern, as a shell does."""
    found = _BRACES.search(pattern)
    if found is None:
        yield pattern
        return
    first, last = found.groups()
    for number in range(int(first), int(last) + 1):
        digits = str(number).zfill(len(first))
        yield from _expand(pattern[: found.start()] + digits + pattern[found.end() :])


def _classes(
    labels: NDArray[np.int64],
    names: Sequence[str | None],
    classes: tuple[str, ...] | None,
    label_offset: int,
    name_of: Callable[[int], str],
) -> tuple[str, ...]:
    """Return the class names, after checking them against the labels."""
    lowest, highest = int(labels.argmin()), int(labels.argmax())
    count = int(labels[highest]) + 1
    advice = (
        "; if labels start from 1, as in the TFRecord files of ImageNet made with TensorFlow's own "
        "script, set label_offset=1"
        if labels[lowest] == 1 and not label_offset
        else ""
    )
    if classes is not None and count > len(classes):
        raise DataError(
            f"{name_of(highest)} has label {count - 1 + label_offset}, but there are "
            f"{len(classes)} classes{advice}"
        )
    known = {} if classes is None or are_unnamed(classes) else dict(enumerate(classes))
    of_training = f"that label is class {{}} in the training images{advice}"
    which = of_training if known else "others with that label have class {}"
    for image, (label, name) in enumerate(zip(labels.tolist(), names, strict=True)):
        if name is not None and known.setdefault(label, name) != name:
            raise DataError(
                f"{name_of(image)} has label {label + label_offset} and class {name}, but "
                f"{which.format(known[label])}"
            )
    if classes is not None:
        return classes
    distinct = len(np.unique(labels))
    most = max(_CLASSES_OF_FEW_LABELS, 10 * distinct)
    _check_label(name_of(highest), count - 1 + label_offset, label_offset, most)
    if advice and count > 2 and distinct == count - 1:
        raise DataError(
            f"labels run from 1 to {count - 1} in {name_of(lowest)} and all others{advice}"
        )
    named = len(known) == count
    return tuple(known[number] if named else str(number) for number in range(count))


def _check_label(name: str, label: int, label_offset: int, most: int = _MOST_CLASSES) -> None:
    if label < label_offset:
        raise DataError(f"{name} has label {label}, less than the label_offset of {label_offset}")
    if label - label_offset >= most:
        raise DataError(
            f"{name}: label {label} is far above the number of classes; valid: class numbers that "
            "count from 0"
        )


def are_unnamed(classes: tuple[str, ...]) -> bool:
    """Whether class names are only numbers, as :func:`index_shards` sets by default."""
    return classes == tuple(str(number) for number in range(len(classes)))
