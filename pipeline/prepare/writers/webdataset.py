"""Tar shards as WebDataset reads them, with the index of DALI's ``wds2idx``, version v1.2.

An image is two files of the tar, ``class/key.jpeg`` and ``class/key.cls``; the latter holds the
number of the class, counted from 0, in decimal digits. https://github.com/webdataset/webdataset
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Sequence

from .base import Entry, Placed, Record

_BLOCK = tarfile.BLOCKSIZE
# White space parts the columns of the index, and a dot the key from the extension.
_UNFIT = re.compile(r"[\s.]")
_SPACE = re.compile(r"\s")
_EXTENSIONS = {"jpg": "jpeg"}


class WebDataset:
    """Tar shards."""

    suffix = ".tar"

    def name(self, name: str) -> str:
        """With underscores for white space and dots in the key, and ``.jpeg`` for ``.JPG``."""
        folder, _, file = name.rpartition("/")
        stem, _, extension = file.rpartition(".")
        extension = extension.lower()
        extension = _EXTENSIONS.get(extension, extension)
        return f"{_SPACE.sub('_', folder)}/{_UNFIT.sub('_', stem)}.{extension}"

    def key(self, name: str) -> str:
        """The name without its extension: files of one key are taken to be one image."""
        return name.rpartition(".")[0]

    def record(self, entry: Entry) -> Record:
        label = str(entry.label).encode()
        return Record(
            before=_header(entry.name, len(entry.content)),
            image=entry.content,
            after=_padding(len(entry.content))
            + _header(f"{self.key(entry.name)}.cls", len(label))
            + label
            + _padding(len(label)),
        )

    def closing(self, size: int) -> bytes:
        """Two empty blocks at least, up to a whole record of tar."""
        return bytes(2 * _BLOCK + -(size + 2 * _BLOCK) % tarfile.RECORDSIZE)

    def idx(self, records: Sequence[Placed]) -> str:
        """Of each component of a sample its extension, place, length and name."""
        lines = [f"v1.2 {len(records)}"]
        for placed in records:
            key, _, extension = placed.name.rpartition(".")
            label_at = placed.start + placed.size - _BLOCK  # it fills the last block of its record
            lines.append(
                f"{extension} {placed.offset} {placed.length} {placed.name} "
                f"cls {label_at} {len(str(placed.label))} {key}.cls"
            )
        return "\n".join(lines) + "\n"


def _header(name: str, size: int) -> bytes:
    """With nothing in it that differs from one run to the next."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT, encoding="utf-8")


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)
