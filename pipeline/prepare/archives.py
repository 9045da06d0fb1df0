"""Downloaded archives: their checksums, and the files in them."""

from __future__ import annotations

import hashlib
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import DataError
from ..progress import Meter, Progress, ProgressCallback
from ..sources.base import is_hidden, is_inside
from .preparation import Preparation

_PIECE_BYTES = 4 * 2**20
_MOST_UNPACKED_BYTES = 2 * 2**30
# Errors of tarfile and its decompressors on broken archives.
_BROKEN = (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, ValueError)


@dataclass(frozen=True)
class Member:
    """A file in an archive: its name and its byte range."""

    name: str
    offset: int
    size: int


def require_file(path: str | os.PathLike[str] | None, option: str, what: str) -> Path:
    """Return the path of a required file.

    Raises:
        DataError: The file was not given or does not exist; the message names the option and
            where to get the file.
    """
    if path is None:
        raise DataError(f"{option} is missing: {what}")
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{option}: there is no file {path}: {what}")
    return path


def check_md5(path: Path, wanted: str, preparation: Preparation, report: ProgressCallback) -> None:
    """Verify the MD5 checksum of an archive, unless an earlier call has done so.

    Raises:
        DataError: The checksum differs, or the archive cannot be read.
    """
    if preparation.is_verified(path):
        return
    digest = hashlib.md5(usedforsecurity=False)
    with _reading(str(path)), path.open("rb", buffering=0) as file:
        meter = Meter(report, f"checksum of {path.name}", total_bytes=path.stat().st_size)
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            meter.add(0, len(piece))
    if digest.hexdigest() != wanted:
        raise DataError(
            f"{path} has the MD5 checksum {digest.hexdigest()}, not {wanted}: download it again "
            "(--no-checksum accepts it as it is)"
        )
    preparation.mark_verified(path)


def members(path: Path, hidden: list[str], within: Member | None = None) -> Iterator[Member]:
    """Yield the files of an uncompressed tar archive, or of an archive inside it.

    The contents of the files are not read.

    Args:
        path: Path of the archive.
        hidden: Gets the names of files that are hidden or the system's, such as ``._a.JPEG``, which
            macOS adds; they are passed over.
        within: The inner archive; None for ``path`` itself.

    Raises:
        DataError: The archive is broken or truncated, or holds a name that leads out of it.
    """
    what = str(path) if within is None else f"{within.name!r} in {path}"
    with _reading(what), path.open("rb") as file:
        end = path.stat().st_size
        if within is not None:
            file.seek(within.offset)
            end = within.offset + within.size
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (info := archive.next()) is not None:
                if info.offset_data + info.size > end:
                    raise tarfile.ReadError("unexpected end of data")
                if info.isfile() and not _is_hidden(what, info.name, hidden):
                    yield Member(info.name, info.offset_data, info.size)
                archive.members = []  # type: ignore[attr-defined]  # otherwise it would keep a million
            # tarfile accepts an archive without its end-of-archive blocks.
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE) or file.tell() > end:
                raise tarfile.ReadError("unexpected end of data")


def report_hidden(path: Path, hidden: list[str], report: ProgressCallback) -> None:
    """Say in one line that files of an archive are passed over, if there are any."""
    if hidden:
        report(Progress(f"{path}: {len(hidden):,} hidden files (such as ._*) are passed over"))


def read_archive(path: Path, report: ProgressCallback) -> dict[str, bytes]:
    """Read all files of a small archive, compressed or not, by name; hidden files are passed over.

    Raises:
        DataError: The archive is broken, truncated, or too large to be held in memory, or holds a
            file twice or a name that leads out of it.
    """
    files: dict[str, bytes] = {}
    hidden: list[str] = []
    total = 0
    with _reading(str(path)), tarfile.open(path) as archive:
        for info in filter(tarfile.TarInfo.isfile, archive):
            if _is_hidden(str(path), info.name, hidden):
                continue
            name = info.name.removeprefix("./")
            if name in files:
                raise DataError(f"{path} holds {name!r} twice; valid: each file once")
            total += info.size
            if total > _MOST_UNPACKED_BYTES:
                raise DataError(f"{path} holds more than {_MOST_UNPACKED_BYTES:,} bytes")
            file = archive.extractfile(info)
            assert file is not None
            files[name] = file.read()
    report_hidden(path, hidden, report)
    return files


def check_count(path: Path, what: str, found: int, wanted: int) -> None:
    """Check that an archive is complete.

    Raises:
        DataError: The number differs.
    """
    if found != wanted:
        raise DataError(
            f"{path} has {found:,} {what}, not {wanted:,} (--allow-partial accepts it as it is)"
        )


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{what} cannot be read: {error.strerror or error}") from error
    except _BROKEN as error:
        raise DataError(f"{what} is broken or truncated ({error}): get it again") from error


def _is_hidden(archive: str, name: str, hidden: list[str]) -> bool:
    """Whether a file is hidden or the system's, and then note its name.

    Raises:
        DataError: The name leads out of the archive.
    """
    if not is_inside(name):
        raise DataError(
            f"{archive} holds the name {name!r}, which is not inside the archive; valid: relative "
            "names without '..'"
        )
    found = any(map(is_hidden, PurePosixPath(name).parts))
    if found:
        hidden.append(name)
    return found
