"""WebDataset tar shards: where the images are in them.

A sample is what follows each other in the tar under one name up to the first dot after the last
slash; what comes after that dot, in small letters, tells what each of its files is
(https://github.com/webdataset/webdataset, ``tariterators.py``). A sample must have one image, and
its class as decimal digits in ``.cls``, or else as ``"label"`` of an object in ``.json``.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ...errors import DataError
from ..folder import EXTENSIONS
from .shard_file import Entry, ShardFile

_BLOCK = tarfile.BLOCKSIZE
_IMAGES = frozenset(extension.removeprefix(".") for extension in EXTENSIONS)


class _Member(NamedTuple):
    """A file in a tar."""

    name: str
    offset: int
    length: int


def scan(path: Path, *, verify: bool = False) -> Iterator[Entry]:
    """The images of a shard, in order.

    The headers of the tar tell where they are. DALI's index ``.idx`` (wds2idx) is not read: to know
    that it is of this tar, and of all of it, takes as long as reading the headers.

    Args:
        path: of the shard.
        verify: has no effect: tar has no checksums of contents.

    Raises:
        DataError: it is not a tar, is compressed or cut off, or a sample has no image or no label.
    """
    with ShardFile(path) as file:
        members = (member for member in _members(file) if _split(member.name)[0])
        for key, sample in groupby(members, lambda member: _split(member.name)[0]):
            yield _entry(file, key, sample)


def _split(name: str) -> tuple[str, str]:
    """What names a sample, and the extension; nothing where a file belongs to no sample."""
    folder, slash, file = name.rpartition("/")
    stem, dot, extension = file.partition(".")
    if not stem or not dot or (name.startswith("__") and name.endswith("__")):
        return "", ""
    return f"{folder}{slash}{stem}", extension.lower()


def _entry(file: ShardFile, key: str, sample: Iterable[_Member]) -> Entry:
    where = f"{file.path}:{key}"
    members: dict[str, _Member] = {}
    for member in sample:
        extension = _split(member.name)[1]
        if extension in members:
            raise DataError(f"{where}.{extension} is there twice")
        members[extension] = member
    images = sorted(_IMAGES & members.keys())
    if len(images) != 1:
        raise DataError(
            f"{where} has the images {' and '.join(f'.{e}' for e in images)}: one is wanted"
            if images
            else f"{where} has no image ({', '.join(EXTENSIONS)}), only "
            + " and ".join(f".{extension}" for extension in members)
        )
    image = members[images[0]]
    return Entry(image.name, _label(file, where, members), image.offset, image.length)


def _label(file: ShardFile, where: str, members: dict[str, _Member]) -> int:
    extension = "cls" if "cls" in members else "json"
    if extension not in members:
        raise DataError(
            f"{where} has no label: neither .cls nor .json with the number of its class"
        )
    content = file.at(members[extension].offset, members[extension].length)
    label = None
    with suppress(ValueError, KeyError, TypeError):
        if extension == "json":
            label = json.loads(content)["label"]
        elif content.strip().isdigit():
            label = int(content)
    if type(label) is not int:
        wanted = "decimal digits" if extension == "cls" else '{"label": number}'
        raise DataError(
            f"{where}.{extension} does not tell the number of a class ({wanted}): {content[:40]!r}"
        )
    return label


def _members(file: ShardFile) -> Iterator[_Member]:
    """The files of a tar, by its headers."""
    try:
        with (
            file.path.open("rb") as content,
            # Not compressed: images are to be read at any place.
            tarfile.open(fileobj=content, mode="r:") as tar,
        ):
            for member in tar:
                if member.isreg():
                    if member.issparse():
                        raise DataError(f"{file.path}:{member.name} is a sparse file of tar")
                    yield _Member(member.name, member.offset_data, member.size)
                tar.members.clear()  # type: ignore[attr-defined]  # else it keeps them all
            end = tar.offset
    except tarfile.TarError as error:
        raise DataError(f"{file.path} is no tar, is compressed, or is cut off ({error})") from error
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror}") from error
    _check_end(file, end)


def _check_end(file: ShardFile, end: int) -> None:
    """Refuse a tar that does not end where its files do: tarfile says nothing of the rest."""
    if file.size < end + _BLOCK:
        raise DataError(f"{file.path} is cut off: it has no end-of-archive block")
    for at in range(end, file.size, 1 << 20):
        if any(file.at(at, min(1 << 20, file.size - at))):
            raise DataError(
                f"{file.path} is damaged: after byte {end:,} comes neither a file of the tar nor "
                "its end (tars that are joined by cat are not one tar)"
            )
