"""WebDataset tar shards, with the index of DALI's ``wds2idx``, version v1.2.

An image takes two files of the tar, ``class/key.jpeg`` and ``class/key.cls``. The latter holds the
class number, from 0, in decimal digits. https://github.com/webdataset/webdataset
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Sequence

from .base import PlacedRecord, Record, Sample

_BLOCK = tarfile.BLOCKSIZE
# White space separates the columns of the index, and a dot separates the key from the extension.
_UNFIT = re.compile(r"[\s.]")
_SPACE = re.compile(r"\s")
_EXTENSIONS = {"jpg": "jpeg"}


class WebDataset:
    """WebDataset tar shards."""

    suffix = ".tar"

    def name(self, name: str) -> str:
        """Replace white space and dots in the key by underscores, and ``.JPG`` by ``.jpeg``."""
        folder, _, file = name.rpartition("/")
        stem, _, extension = file.rpartition(".")
        extension = extension.lower()
        extension = _EXTENSIONS.get(extension, extension)
        return f"{_SPACE.sub('_', folder)}/{_UNFIT.sub('_', stem)}.{extension}"

    def key(self, name: str) -> str:
        """Return the name without its extension: files with the same key are one sample."""
        return name.rpartition(".")[0]

    def record(self, sample: Sample) -> Record:
        """Return the tar headers and contents of the image file and of its label file."""
        label = str(sample.label).encode()
        return Record(
            before=_header(sample.name, len(sample.content)),
            image=sample.content,
            after=_padding(len(sample.content))
            + _header(f"{self.key(sample.name)}.cls", len(label))
            + label
            + _padding(len(label)),
        )

    def footer(self, size: int) -> bytes:
        """Return at least two empty blocks, up to a multiple of tar's record size."""
        return bytes(2 * _BLOCK + -(size + 2 * _BLOCK) % tarfile.RECORDSIZE)

    def idx(self, records: Sequence[PlacedRecord]) -> str:
        """Return extension, offset, size and name of each file of a sample."""
        lines = [f"v1.2 {len(records)}"]
        for placed in records:
            key, _, extension = placed.name.rpartition(".")
            label_at = (
                placed.start + placed.size - _BLOCK
            )  # the label fills the last block of the record
            lines.append(
                f"{extension} {placed.offset} {placed.length} {placed.name} "
                f"cls {label_at} {len(str(placed.label))} {key}.cls"
            )
        return "\n".join(lines) + "\n"


def _header(name: str, size: int) -> bytes:
    """Return a tar header whose fields are the same in every run."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT, encoding="utf-8")


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)
