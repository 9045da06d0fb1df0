"""Small files that a run left or a person wrote: read within bounds, as plain data.

Such a file may be damaged in any way, or be no file: opening a FIFO would wait for ever, and a
device may have no end. Who reads one here gets its content, an OSError or a DamagedFileError, and
values of a stated type. Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Most bytes of a file, unless its reader says otherwise; parsed, it takes up to 20 times as many.
MOST_BYTES = 2**24
#: Most lists and objects inside each other: who walks them has Python's limit of 1,000 calls.
DEEPEST = 64


#: Most values, those of a YAML alias counted wherever it stands.
MOST_VALUES = 2**20
#: Largest number: beyond those of FP32, and its products are numbers too.
LARGEST = 1e100


_TOO_DEEP = f"it is nested more than {DEEPEST} deep"


class DamagedFileError(ValueError):
    """Raised for a file whose content is not what it should be; the message says what it is."""


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most ``most`` bytes, without waiting for anybody to write it."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DamagedFileError("it is no regular file")
            content = file.read(most + 1)
    except IsADirectoryError:
        raise DamagedFileError("it is a folder") from None
    if len(content) > most:
        raise DamagedFileError(f"it has more than {most:,} bytes")
    return content


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Read a file of UTF-8; raises as :func:`read_bytes` does, and for other text."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise DamagedFileError(str(error)) from None


def parse_json(text: bytes) -> Any:
    """Parse JSON of bounded depth."""
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):  # also of bytes that are no UTF-8
        raise DamagedFileError("it is not JSON") from None
    # Counting is quicker than looking, and mostly enough.
    if text.count(b"[") + text.count(b"{") > DEEPEST:
        check_plain(content)
    return content


def parse_yaml(content: str, loader: Any = None) -> Any:
    """Parse YAML of bounded depth and size."""
    import yaml

    try:
        if loader is None and hasattr(yaml, "CSafeLoader"):  # ten times as fast, if it was built
            loader = yaml.CSafeLoader
            _check_nesting(yaml.parse(content, loader))  # on which the C code would crash
        found: Any = yaml.load(content, loader or yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise DamagedFileError(f"{line}{error.problem}") from None
    except DamagedFileError:
        raise
    except RecursionError:
        raise DamagedFileError(_TOO_DEEP) from None
    except Exception as error:  # PyYAML has many for a value that is not of its tag
        problem = " ".join(str(error).split()) or type(error).__name__
        raise DamagedFileError(problem) from None
    check_plain(found)
    return found


def _check_nesting(events: Iterable[Any]) -> None:
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > DEEPEST:
            raise DamagedFileError(_TOO_DEEP)


def check_plain(content: Any) -> None:
    """Check that lists, objects and integers are of bounded size, and that keys are text."""
    left = MOST_VALUES

    def visit(value: Any, depth: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise DamagedFileError(f"it has more than {MOST_VALUES:,} values")
        if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
            raise DamagedFileError(f"it has an integer beyond {LARGEST:g}")
        if not isinstance(value, dict | list):
            return
        if not depth:
            raise DamagedFileError(_TOO_DEEP)
        for part in value.values() if isinstance(value, dict) else value:
            visit(part, depth - 1)
        for key in value if isinstance(value, dict) else ():
            if not isinstance(key, str):
                raise DamagedFileError(f"the key {key!r:.40} is not text")

    visit(content, DEEPEST)


def read_object(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """Read the object in a JSON file; raises as :func:`read_bytes` does, and for other content."""
    content = parse_json(read_bytes(path, most))
    if not isinstance(content, dict):
        raise DamagedFileError("it is not an object")
    return content


def object_in(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty if there is none that can be read."""
    try:
        return read_object(path)
    except (OSError, DamagedFileError):
        return {}


def number(value: Any) -> float | None:
    """Return a value if it is a number of which a product can be taken, up to 1e100, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -LARGEST <= value <= LARGEST else None  # NaN is neither


def whole(value: Any) -> int | None:
    """Return a value if it is an integer from 0 up to 2**53, else None."""
    is_one = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53
    return value if is_one else None


def text(value: Any) -> str | None:
    """Return a value if it is text, else None."""
    return value if isinstance(value, str) else None


def write_text(path: Path, content: str) -> None:
    """Write a file of UTF-8 in one piece: whatever happens, it is the old one or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
