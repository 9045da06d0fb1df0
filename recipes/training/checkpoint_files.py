"""The files of a checkpoint: flushed to the disk when written, verified when read.

``state.json`` holds the size and the SHA-256 of each other file, and that of its own content.
"""

from __future__ import annotations

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
        RecipeError: A file is missing or differs, or ``state.json`` itself does.
    """
    if FILES not in content and DIGEST not in content:
        return
    rest = {key: value for key, value in content.items() if key != DIGEST}
    if content.get(DIGEST) != _digest(rest):
        raise RecipeError(
            f"resume.from: {folder} is damaged: {STATE} is not as it was written; {_VALID}"
        )
    problem = _problem(folder, json.dumps(content[FILES]), _times(folder, content[FILES]))
    if problem:
        raise RecipeError(f"resume.from: {folder} is damaged: {problem}; {_VALID}")


def _times(folder: Path, names: Iterable[str]) -> tuple[int, ...]:
    """When files were changed last, 0 for one that is not there."""
    paths = (folder / name for name in names)
    return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)


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
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def _digest(content: dict[str, Any]) -> str:
    # As it is after it was written and read, so that tuples are lists, for example.
    text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
