"""Downloaded archives: their checksums, and the files in them."""

from __future__ import annotations

import hashlib
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ..errors import DataError
from ..progress import Meter, Progress, ProgressCallback
from ..sources.base import check_inside, is_hidden
from ..sources.shards import webdataset
from ..sources.shards.shard_file import ShardFile
from ..sources.shards.webdataset import Member
from ..sources.storage.local import LocalStorage

_PIECE_BYTES = 4 * 2**20
_MOST_UNPACKED_BYTES = 2 * 2**30
# Errors of tarfile and its decompressors on broken archives.
_BROKEN = (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, ValueError)


def require_file(path: str | os.PathLike[str] | None, option: str, what: str) -> Path:
    """Return the path of a required file; an error names the option and where to get it."""
    if path is None:
        raise DataError(f"{option} is missing: {what}")
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{option}: there is no file {path}: {what}")
    return path


def check_md5(path: Path, wanted: str, report: ProgressCallback) -> None:
    """Verify the MD5 checksum of an archive."""
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


def members(path: Path, hidden: list[str], within: Member | None = None) -> Iterator[Member]:
    """Yield the files of an uncompressed tar archive, or of an archive ``within`` it.

    Files that are hidden or the system's, such as ``._a.JPEG``, which macOS adds, are passed over,
    and their names added to ``hidden``.
    """
    storage = LocalStorage(path.parent)
    if within is None:
        file, start = ShardFile(storage, path.name), 0
    else:
        start = within.offset
        file = ShardFile(storage, path.name, size=start + within.length)
        file.where = f"{within.name!r} in {path}"
    for member in webdataset.members(file, start):
        if not _is_hidden(member.name, hidden):
            yield member


def report_hidden(path: Path, hidden: list[str], report: ProgressCallback) -> None:
    """Say in one line that files of an archive are passed over, if there are any."""
    if hidden:
        report(Progress(f"{path}: {len(hidden):,} hidden files (such as ._*) are passed over"))


def read_archive(path: Path, report: ProgressCallback) -> dict[str, bytes]:
    """Read all files of a small archive, compressed or not, by name, but for hidden files."""
    files: dict[str, bytes] = {}
    hidden: list[str] = []
    total = 0
    with _reading(str(path)), tarfile.open(path) as archive:
        for info in filter(tarfile.TarInfo.isfile, archive):
            check_inside(info.name, str(path))
            if _is_hidden(info.name, hidden):
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
    """Check that an archive has all of its files."""
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


def _is_hidden(name: str, hidden: list[str]) -> bool:
    """Whether a file is hidden or the system's; if it is, its name is noted."""
    found = any(map(is_hidden, PurePosixPath(name).parts))
    if found:
        hidden.append(name)
    return found
