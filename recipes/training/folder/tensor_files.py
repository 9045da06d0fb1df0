"""Files of tensors and plain data: written by ``torch.save``, and read without running their code.

A pickle may run any command, so files are read with ``weights_only=True``.
"""

from __future__ import annotations

import errno
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Classes of which ``torch.load`` reads objects back without running code from the file.
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class NotPlainError(ValueError):
    """Raised where a state holds something else than plain data; the message names its class."""


def check_plain(content: Any) -> None:
    """Check that ``torch.load`` reads ``content`` back without running code from the file."""
    if type(content) in (dict, OrderedDict):
        content = [*content.keys(), *content.values()]
    if type(content) in (list, tuple, set, torch.Size):
        for part in content:
            check_plain(part)
    elif type(content) not in (*_PLAIN, Tensor, torch.nn.Parameter):
        raise NotPlainError(type(content).__qualname__)


def tensors_in(content: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dictionaries, lists and tuples."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict | list | tuple):
        for part in content.values() if isinstance(content, dict) else content:
            yield from tensors_in(part)


def write_tensors(path: Path, content: dict[str, Any]) -> None:
    """Write nested dictionaries of tensors and plain data, flushed to the disk."""
    # Through a file of Python's, whose errors say what is wrong with the disk.
    try:
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch wraps some errors of the disk
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        number, text = (cause.errno, cause.strerror) if cause else (errno.EIO, str(error))
        raise OSError(number or errno.EIO, str(text).splitlines()[0], str(path)) from error


def read_tensors(path: Path) -> dict[str, Any]:
    """Read what :func:`write_tensors` wrote, onto the CPU; the tensors map the file."""
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise ValueError(f"{path.name} holds an object that is not plain data") from None
    except Exception as error:  # of any kind
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"{path.name} cannot be read: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}, not a dictionary")
    return content


def damage_of(path: Path) -> str:
    """What is wrong with a file of ``torch.save``; nothing if it is intact or no such file."""
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":  # of a zip file
                return ""
        with zipfile.ZipFile(path) as records:
            if name := records.testzip():
                return f"the CRC-32 of its record {name} is not that of when it was written"
    except Exception as error:  # zipfile raises errors of many kinds
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"its records cannot be read ({reason})"
    return ""
