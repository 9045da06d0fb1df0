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

import torch
from torch import Tensor

from ...errors import RecipeError
from .tensor_files import read_tensors

STATE = "state.json"
#: What all ranks have in common: ``parameters``, ``optimizer``, and ``ema`` if there is an average.
MODEL = "model.pt"
#: Most bytes of it: callbacks of users keep in it what they like.
MOST_BYTES = 2**26
FILES, DIGEST = "files", "sha256"
VALID = "another checkpoint, resume=PATH"
#: Errors of file systems that cannot flush a folder, such as SMB and some in user space.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


class CheckpointError(RecipeError):
    """Raised for a checkpoint that cannot be used.

    Args:
        problem: The checkpoint, and what is wrong with it.
        valid: What would be valid.
    """

    def __init__(self, problem: str, valid: str = VALID) -> None:
        super().__init__(f"resume.from: {problem}; valid: {valid}")
        self.problem = problem


class DamagedError(CheckpointError):
    """Raised for a checkpoint whose files are not as they were written."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} is damaged: {problem}")


def unreadable(path: object, error: OSError) -> CheckpointError:
    """The error about a checkpoint that may be intact, and cannot be read now."""
    valid = f"the same command again when it can be, or {VALID}"
    return CheckpointError(f"{path} cannot be read: {error.strerror}", valid)


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


def verify(folder: Path, content: dict[str, Any], *, files_too: bool = True) -> None:
    """Check the files of a checkpoint against what ``state.json`` says of them.

    Files that were verified once in this process are not read again.

    Args:
        folder: The checkpoint's folder.
        content: Content of its ``state.json``.
        files_too: Whether to compare the other files with it, or only ``state.json`` with itself.

    Raises:
        DamagedError: A file is missing or differs, or ``state.json`` itself does.
        CheckpointError: A file cannot be read, for another reason.
    """
    rest = {key: value for key, value in content.items() if key != DIGEST}
    problem = f"{STATE} is not as it was written"
    if content.get(DIGEST) == _digest(rest) and _are_facts(content.get(FILES)):
        files = content[FILES]
        try:
            problem = ""
            if files_too:
                problem = _problem(folder, json.dumps(files), _times(folder, files))
        except OSError as error:
            raise unreadable(error.filename, error) from error
    if problem:
        raise DamagedError(folder, problem)


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


def of_rank(rank: int) -> str:
    """The name of the file of what a rank has of its own: ``buffers``, and ``ema_buffers``."""
    return f"rank-{rank}.pt"


def read_parts(path: Path, ranks: Iterable[int]) -> list[dict[str, Any]]:
    """Read a verified checkpoint's tensors: what all ranks have in common, then those of each rank.

    Raises:
        DamagedError: a file cannot be read, or does not hold what :meth:`Checkpoints.save` writes.
    """
    expected = {MODEL: {"parameters", "optimizer"}} | {of_rank(rank): {"buffers"} for rank in ranks}
    found = []
    for name, keys in expected.items():
        try:
            content = read_tensors(path / name)
        except ValueError as problem:
            raise DamagedError(path, str(problem)) from None
        if not content.keys() >= keys:
            raise DamagedError(path, f"{name} has no {', '.join(keys)}")
        found.append(content)
    return found


def mean_over_ranks(of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The buffers of several ranks as one: the mean; of integers, those of the first rank."""
    if len(of_ranks) == 1:
        return of_ranks[0]
    return {
        name: torch.stack([one[name] for one in of_ranks]).mean(0)
        if value.is_floating_point()
        else value
        for name, value in of_ranks[0].items()
    }
