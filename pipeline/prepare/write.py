"""Writing a data set, as class folders or as WebDataset shards.

A shard is a tar in which an image takes two files, ``class/key.jpeg`` and ``class/key.cls``. The
latter holds the class number, from 0, in decimal digits. Beside it lies the index of DALI's
``wds2idx``, version v1.2. https://github.com/webdataset/webdataset

The images of a shard, and hence its bytes, depend on the settings alone.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..order import epoch_order
from ..progress import Meter, Progress, ProgressCallback
from ..sources import INDEX_FILE, index_shards
from .images import Images, has_image_signature
from .output import Output
from .preparation import Preparation, completed
from .shrink import shrink

_FILES_PER_UNIT = 256
_JPEG = (".jpeg", ".jpg")
# White space separates the columns of DALI's index, and a dot separates key and extension.
_SPACE = re.compile(r"\s")
_UNFIT_IN_KEY = re.compile(r"[\s.]")


class _Unit(NamedTuple):
    """Images of a split that are written together: those ``numbers``, in this order."""

    images: Images
    names: list[str]  # of all images of the split, unless they are re-encoded
    folder: Path
    number: int
    numbers: NDArray[np.int64]


def build(
    preparation: Preparation, splits: Sequence[Images], output: Output, report: ProgressCallback
) -> dict[str, int]:
    """Write a data set, or go on where an earlier call was killed; return the images by split."""
    preparation.begin(splits)
    meter = Meter(
        report,
        f"writing {' and '.join(images.split for images in splits)}",
        sum(len(images) for images in splits),
        sum(int(images.sizes.sum()) for images in splits),
    )
    units: list[_Unit] = []
    for images in splits:
        if folder := preparation.folder(images.split):
            units += _units(images, output, folder)
        else:
            meter.add(len(images), int(images.sizes.sum()))
    write = _write_shard if output.sharded else _write_files
    for _ in meter.in_threads(lambda unit: write(unit, output, meter), units, output.threads):
        pass
    if output.sharded:
        for images in splits:
            if folder := preparation.folder(images.split):
                _write_index([unit for unit in units if unit.images is images], folder, report)
    preparation.finish(splits)
    return preparation.finished_counts() or {}


def _units(images: Images, output: Output, folder: Path) -> Iterator[_Unit]:
    names = _names(images, output)
    count = len(images)
    order: NDArray[np.int64] = np.arange(count)
    if not output.sharded:
        units = -(-count // _FILES_PER_UNIT)
        for name in {name.rpartition("/")[0] for name in names}:
            (folder / name).mkdir(exist_ok=True)
    else:
        if images.split == "train":
            order = epoch_order(count, output.seed, 0)
        if output.images_per_shard is not None:
            units = -(-count // output.images_per_shard)
        else:
            units = max(1, min(count, -(-int(images.sizes.sum()) // output.shard_bytes)))
    for number, numbers in enumerate(np.array_split(order, units)):
        yield _Unit(images, names, folder, number, numbers)


def _write_files(unit: _Unit, output: Output, meter: Meter) -> None:
    partial = unit.folder / f"{unit.number}.partial"
    for number in unit.numbers.tolist():
        possible = (unit.folder / name for name in _possible(unit.names[number], output))
        # A crash of the machine may leave a file without content.
        if not any(path.exists() and path.stat().st_size for path in possible):
            name, content = _content(unit, number, output)
            partial.unlink(missing_ok=True)  # not to write into what it may be a link to
            source = unit.images.path if output.resize is None else None
            if source is None or not _linked(source(number), partial):
                partial.write_bytes(content)
            os.replace(partial, unit.folder / name)
        meter.add(1, int(unit.images.sizes[number]))


def _linked(file: str, link: Path) -> bool:
    """Make a hard link, which outlives the source; return False where there is none."""
    try:
        os.link(os.path.realpath(file), link)
    except OSError:
        return False
    return True


def _write_shard(unit: _Unit, output: Output, meter: Meter) -> None:
    images = unit.images
    path = unit.folder / f"{images.split}-{unit.number:05d}.tar"
    idx = path.with_suffix(".idx")
    if path.exists() and idx.exists():
        meter.add(len(unit.numbers), int(images.sizes[unit.numbers].sum()))
        return
    lines = [f"v1.2 {len(unit.numbers)}"]
    with completed(path) as file:
        form = tarfile.GNU_FORMAT
        with tarfile.open(fileobj=file, mode="w", format=form, encoding="utf-8") as tar:
            for number in unit.numbers.tolist():
                name, content = _content(unit, number, output)
                key, _, extension = name.rpartition(".")
                label = str(images.labels[number]).encode()
                at, label_at = _add(tar, name, content), _add(tar, f"{key}.cls", label)
                lines.append(
                    f"{extension} {at} {len(content)} {name} cls {label_at} {len(label)} {key}.cls"
                )
                meter.add(1, int(images.sizes[number]))
        with completed(idx) as text:  # before the shard has its name
            text.write("".join(f"{line}\n" for line in lines).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> int:
    """Append a file whose header is the same in every run; return the offset of its content."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
    return tar.offset - len(content) - -len(content) % tarfile.BLOCKSIZE


def _write_index(units: list[_Unit], folder: Path, report: ProgressCallback) -> None:
    """Write the index of a split from its shards, which must hold what they should."""
    images, names = units[0].images, units[0].names
    order = np.concatenate([unit.numbers for unit in units])

    def progress(done: int, total: int) -> None:
        report(Progress(f"verifying {images.split}", bytes=done, total_bytes=total))

    try:
        index = index_shards(
            folder, "webdataset", classes=images.classes, checksums=True, progress=progress
        )
        found = zip(map(_key, index.names), index.labels, strict=True)
        wanted = ((_key(names[number]), images.labels[number]) for number in order)
        pairs = enumerate(zip_longest(found, wanted))
        first = next((at for at, (one, other) in pairs if one != other), None)
        if first is not None:
            shard = index.shards[index.shard[min(first, len(index) - 1)]]
            raise DataError(f"{folder / shard} holds other images")
    except DataError as error:
        raise DataError(f"{error}; remove this shard to write it again") from error
    # Without times, so that an interrupted preparation makes the same file.
    replace(index, shard_times=None).save(folder / INDEX_FILE)


def _content(unit: _Unit, number: int, output: Output) -> tuple[str, bytes]:
    images, name = unit.images, unit.names[number]
    content = images.read(number)
    if not has_image_signature(content):
        raise DataError(
            f"{images.split}/{images.names[number]} "
            f"{'does not start as an image file' if content else 'is empty'}: remove it; "
            "largebatch data check lists all such images of a folder"
        )
    if output.resize is None:
        return name, content
    try:
        smaller = shrink(content, output.resize, output.quality)
    except ValueError as error:
        raise DataError(
            f"{images.split}/{images.names[number]} cannot be decoded: {error}"
        ) from error
    return (name, content) if smaller is None else (_jpeg_name(name), smaller)


def _names(images: Images, output: Output) -> list[str]:
    """Return the names of images that are not re-encoded, after checking for duplicates."""
    names = list(map(_name_in_shard, images.names)) if output.sharded else images.names
    keys = dict[str, str]()
    for original, name in zip(images.names, names, strict=True):
        possible = _possible(name, output)
        for key in {_key(n) for n in possible} if output.sharded else possible:
            if keys.setdefault(key, original) != original:
                raise DataError(
                    f"{images.split}/{keys[key]} and {images.split}/{original} would both be "
                    f"{key} in format={output.format}: rename one"
                )
    return names


def _possible(name: str, output: Output) -> set[str]:
    """Return the names that an image may get, which depend on whether it is re-encoded."""
    return {name} if output.resize is None else {name, _jpeg_name(name)}


def _jpeg_name(name: str) -> str:
    return name if name.lower().endswith(_JPEG) else f"{name.rpartition('.')[0]}.jpeg"


def _name_in_shard(name: str) -> str:
    """Replace white space and dots in the key by underscores, and ``.JPG`` by ``.jpeg``."""
    folder, _, file = name.rpartition("/")
    stem, _, extension = file.rpartition(".")
    extension = extension.lower()
    extension = "jpeg" if extension == "jpg" else extension
    return f"{_SPACE.sub('_', folder)}/{_UNFIT_IN_KEY.sub('_', stem)}.{extension}"


def _key(name: str) -> str:
    """Return the name without its extension: in a shard, files with the same key are one sample."""
    return name.rpartition(".")[0]
