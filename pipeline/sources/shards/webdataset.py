"""The images of a WebDataset tar shard.

A sample is a run of consecutive files in the tar whose names agree up to the first dot after the
last slash; the rest of the name, in lower case, is the type of the file
(https://github.com/webdataset/webdataset, ``tariterators.py``). A sample must have one image, and
its class number as decimal digits in ``.cls`` or as ``"label"`` of an object in ``.json``.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

from ...errors import DataError
from ..base import EXTENSIONS, check_inside
from .shard_file import Entry, ShardFile

_BLOCK = tarfile.BLOCKSIZE
_IMAGES = frozenset(extension.removeprefix(".") for extension in EXTENSIONS)


class Member(NamedTuple):
    """A file in a tar, and its byte range."""

    name: str
    offset: int
    length: int


def scan(file: ShardFile, *, verify: bool = False, start: int = 0) -> Iterator[Entry]:
    """Yield the images of a shard in order, from the headers of the tar.

    There are no checksums to ``verify``. DALI's index ``.idx`` (wds2idx) is not used: to verify
    that it belongs to this tar and is complete takes as long as reading the headers.
    """
    seen = set[str]()
    in_samples = (member for member in members(file, start) if _split(member.name)[0])
    for key, sample in groupby(in_samples, lambda member: _split(member.name)[0]):
        if key in seen:
            raise DataError(
                f"{file.where}:{key} occurs twice, as after tar -r: write the shard again"
            )
        files = list(sample)
        if start and not seen and not any(_split(m.name)[1] in _IMAGES for m in files):
            continue  # what follows the image of the sample before
        seen.add(key)
        yield _entry(file, key, files)


def _split(name: str) -> tuple[str, str]:
    """Return sample key and extension of a file name; empty if the file is not in a sample."""
    folder, slash, file = name.rpartition("/")
    stem, dot, extension = file.partition(".")
    if not stem or not dot or (name.startswith("__") and name.endswith("__")):
        return "", ""
    return f"{folder}{slash}{stem}", extension.lower()


def _entry(file: ShardFile, key: str, sample: Iterable[Member]) -> Entry:
    where = f"{file.where}:{key}"
    by_type: dict[str, Member] = {}
    for member in sample:
        extension = _split(member.name)[1]
        if extension in by_type:
            raise DataError(f"{where}.{extension} occurs twice")
        by_type[extension] = member
    images = sorted(_IMAGES & by_type.keys())
    # The image of another sample, with a label of its own, whose key contains a dot.
    labels = (".cls",) if images else (".cls", ".json")
    for extension, member in by_type.items():
        stem = _dotted(extension)
        if stem and any(f"{stem}{label}" in by_type for label in labels):
            count = sum(bool(_dotted(_split(m.name)[1])) for m in members(file))
            kind = extension.removeprefix(f"{stem}.")
            raise DataError(
                f"{file.where}:{member.name} has a key with a dot, as have {count:,} images: keys "
                f"must not contain dots; valid: {key}_{stem.replace('.', '_')}.{kind}"
            )
    if len(images) != 1:
        raise DataError(
            f"{where} has the images {' and '.join(f'.{e}' for e in images)}; valid: one image"
            if images
            else f"{where} has no image ({', '.join(EXTENSIONS)}), only "
            + " and ".join(f".{extension}" for extension in [*by_type][:4])
        )
    image = by_type[images[0]]
    return Entry(image.name, _label(file, where, by_type), image.offset, image.length)


def _dotted(extension: str) -> str:
    """Return what stands between the first and the last dot of an image's name; empty if none."""
    stem, _, kind = extension.rpartition(".")
    return stem if kind in _IMAGES else ""


def _label(file: ShardFile, where: str, by_type: dict[str, Member]) -> int:
    extension = "cls" if "cls" in by_type else "json"
    if extension not in by_type:
        raise DataError(f"{where} has no label; valid: .cls or .json with its class number")
    content = file.at(by_type[extension].offset, by_type[extension].length)
    label = None
    with suppress(ValueError, KeyError, TypeError):
        if extension == "json":
            label = json.loads(content)["label"]
        elif content.strip().isdigit():
            label = int(content)
    if type(label) is not int:
        wanted = "decimal digits" if extension == "cls" else '{"label": number}'
        raise DataError(
            f"{where}.{extension} has no class number: {content[:40]!r}; valid: {wanted}"
        )
    return label


def members(file: ShardFile, start: int = 0) -> Iterator[Member]:
    """Yield the files of an uncompressed tar from its headers, those after byte ``start``."""
    stream: Any = file
    stream.seek(start + -start % _BLOCK)
    try:
        # Uncompressed only, for random access to the images.
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                if member.isreg():
                    check_inside(member.name, file.where)
                    if member.issparse():
                        raise DataError(
                            f"{file.where}:{member.name} is a sparse file, which is not supported"
                        )
                    yield Member(member.name, member.offset_data, member.size)
                tar.members.clear()  # type: ignore[attr-defined]  # otherwise it would keep them all
            end = tar.offset
    except tarfile.TarError as error:
        raise DataError(
            f"{file.where} is not a tar, is compressed, or is truncated ({error})"
        ) from error
    # Nothing may follow the last file: tarfile ignores the rest.
    if file.size < end + _BLOCK:
        raise DataError(f"{file.where} is truncated: it has no end-of-archive block")
    for at in range(end, file.size, 1 << 20):
        if any(file.at(at, min(1 << 20, file.size - at))):
            raise DataError(
                f"{file.where} is damaged: neither a file of the tar nor its end follows byte "
                f"{end:,} (tars joined by cat are not one tar)"
            )
