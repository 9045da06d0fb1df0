"""The files of a checkpoint: flushed to the disk when written, verified when read.

``state.json`` holds the size and the SHA-256 of each other file, and that of its own content.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import RecipeError

STATE = "state.json"
FILES, DIGEST = "files", "sha256"
_VALID = "valid: another checkpoint, resume=PATH"
#: Errors of file systems that cannot flush a folder, such as SMB and some in user space.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


class DamagedError(RecipeError):
    """Raised for a checkpoint whose files are not as they were written."""


def unreadable(path: Path, error: OSError) -> RecipeError:
    """The error about a checkpoint that may be intact, and cannot be read now."""
    return RecipeError(
        f"resume.from: {path} cannot be read: {error.strerror}; valid: the same command again "
        "when it can be, or another checkpoint, resume=PATH"
    )


def facts_of(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the size in bytes and the SHA-256 of files, by name, as they are on the disk.

    The files are flushed first, so that they survive a loss of power.
    """
    found = {}
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[path.name] = {"bytes": path.stat().st_size, DIGEST: digest}
    return found


def write_state(folder: Path, content: dict[str, Any], files: dict[str, dict[str, Any]]) -> None:
    """Write ``state.json``, and flush it and the folder."""
    content = {**content, FILES: dict(sorted(files.items()))}
    with (folder / STATE).open("w") as file:
        file.write(json.dumps({**content, DIGEST: _digest(content)}, indent=2))
        file.flush()
        os.fsync(file.fileno())
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(opened)


def verify(folder: Path, content: dict[str, Any]) -> None:
    """Check the files of a checkpoint against what ``state.json`` says of them.

    Checkpoints of versions that did not write this are taken as they are. Files that were verified
    once in this process are not read again.

    Args:
        folder: The checkpoint's folder.
        content: Content of its ``state.json``.

    Raises:
        DamagedError: A file is missing or differs, or ``state.json`` itself does.
        RecipeError: A file cannot be read, for another reason.
    """
    if FILES not in content and DIGEST not in content:
        return
    rest = {key: value for key, value in content.items() if key != DIGEST}
    problem = f"{STATE} is not as it was written"
    if content.get(DIGEST) == _digest(rest) and _are_facts(content.get(FILES)):
        files = content[FILES]
        try:
            problem = _problem(folder, json.dumps(files), _times(folder, files))
        except OSError as error:
            raise RecipeError(
                f"resume.from: {error.filename} cannot be read: {error.strerror}; valid: the same "
                "command again when it can be, or another checkpoint, resume=PATH"
            ) from error
    if problem:
        raise DamagedError(f"resume.from: {folder} is damaged: {problem}; {_VALID}")


def _are_facts(files: Any) -> bool:
    """Whether this is what :func:`facts_of` returns."""
    return isinstance(files, dict) and all(
        Path(name).name == name and isinstance(facts, dict) and {"bytes", DIGEST} <= {*facts}
        for name, facts in files.items()
    )


def _times(folder: Path, names: Iterable[str]) -> tuple[int, ...]:
    """When files were changed last, 0 for one that is not there."""
    times = []
    for name in names:
        try:
            times.append((folder / name).stat().st_mtime_ns)
        except FileNotFoundError:
            times.append(0)
    return tuple(times)


@lru_cache(maxsize=64)
def _problem(folder: Path, files: str, times: tuple[int, ...]) -> str:
    """What is wrong with a checkpoint's files; nothing where they are as they were written."""
    for name, facts in json.loads(files).items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != facts["bytes"]:
                return f"{name} has {size:,} bytes, not {facts['bytes']:,}"
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != facts[DIGEST]:
                    return f"the SHA-256 of {name} is not that of when it was written"
        except FileNotFoundError:
            return f"{name} is missing"
    return ""


def _digest(content: dict[str, Any]) -> str:
    # As it is after it was written and read, so that tuples are lists, for example.
    text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
