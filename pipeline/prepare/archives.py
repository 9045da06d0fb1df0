"""Archives as they are downloaded: their checksums, and where their files lie in them."""

from __future__ import annotations

import hashlib
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..progress import Meter, Report
from ..sources.storage.local import read_run
from .workplace import Workplace

_PIECE_BYTES = 4 * 2**20
_MOST_UNPACKED_BYTES = 2 * 2**30
# What tarfile and the decompressors below it raise on archives that are broken.
_BROKEN = (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, ValueError)


@dataclass(frozen=True)
class Member:
    """A file in an archive: its name, and the run of bytes that it is."""

    name: str
    offset: int
    size: int


def need(path: str | os.PathLike[str] | None, option: str, what: str) -> Path:
    """The path of a file that was given and is there.

    Raises:
        DataError: it is not; the message tells the option and what to get from where.
    """
    if path is None:
        raise DataError(f"{option} is missing: {what}")
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{option}: there is no file {path}: {what}")
    return path


def check_md5(path: Path, wanted: str, place: Workplace, report: Report) -> None:
    """Hold an archive to its checksum, unless that was done already.

    Raises:
        DataError: it has another one, or cannot be read.
    """
    if place.is_checked(path):
        return
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with path.open("rb", buffering=0) as file:
            meter = Meter(report, f"checksum of {path.name}", total_bytes=path.stat().st_size)
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                meter.add(0, len(piece))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if digest.hexdigest() != wanted:
        raise DataError(
            f"{path} has the MD5 checksum {digest.hexdigest()}, not {wanted}: download it again "
            "(--no-checksum takes it as it is)"
        )
    place.checked(path)


def members(path: Path, within: Member | None = None) -> Iterator[Member]:
    """The files in a tar archive that is not compressed, or in one that lies in it.

    Their data are not read.

    Args:
        path: of the archive.
        within: an archive in it.

    Raises:
        DataError: it is no archive, or was cut short.
    """
    what = str(path) if within is None else f"{within.name} in {path}"
    try:
        with path.open("rb") as file:
            end = path.stat().st_size
            if within is not None:
                file.seek(within.offset)
                end = within.offset + within.size
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while (info := archive.next()) is not None:
                    if info.offset_data + info.size > end:
                        raise tarfile.ReadError("unexpected end of data")
                    if info.isfile():
                        yield Member(info.name, info.offset_data, info.size)
                    archive.members = []  # type: ignore[attr-defined]  # a million otherwise
                # tarfile takes an archive that ends before its end mark for whole.
                file.seek(archive.offset)
                if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE) or file.tell() > end:
                    raise tarfile.ReadError("unexpected end of data")
    except OSError as error:
        raise DataError(f"{what} cannot be read: {error.strerror or error}") from error
    except _BROKEN as error:
        raise DataError(f"{what} is no whole tar archive ({error}): get it again") from error


def unpacked(path: Path) -> dict[str, bytes]:
    """All files of a small archive, compressed or not, by name.

    Raises:
        DataError: it is no archive, was cut short, or is too large for this.
    """
    files: dict[str, bytes] = {}
    total = 0
    try:
        with tarfile.open(path) as archive:
            for info in archive:
                if not info.isfile():
                    continue
                total += info.size
                if total > _MOST_UNPACKED_BYTES:
                    raise DataError(f"{path} holds more than {_MOST_UNPACKED_BYTES:,} bytes")
                file = archive.extractfile(info)
                assert file is not None
                files[info.name.removeprefix("./")] = file.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except _BROKEN as error:
        raise DataError(f"{path} is no whole tar archive ({error}): get it again") from error
    return files


class Runs(AbstractContextManager["Runs"]):
    """Runs of bytes of one file, read at any place by any thread.

    Args:
        path: the file.
        offsets: of the runs, int64, shape ``[runs]``.
        sizes: of the runs, int64, shape ``[runs]``.
    """

    def __init__(self, path: Path, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        self._path = path
        self._offsets = offsets
        self._sizes = sizes
        self._file = path.open("rb", buffering=0)

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, number: int) -> bytes:
        """The bytes of a run."""
        return read_run(
            self._file.fileno(), int(self._offsets[number]), int(self._sizes[number]), self._path
        )
