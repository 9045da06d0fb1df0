"""Small files that a run left or a person wrote, read as plain data.

Such a file may be damaged in any way. Who reads one here gets its content, an OSError or a
DamagedFileError, and values of a stated type. Imports nothing heavy.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Largest number: beyond those of FP32, and its products are numbers too.
LARGEST = 1e100


class DamagedFileError(ValueError):
    """Raised for a file whose content is not what it should be; the message says what it is."""


def read_text(path: Path) -> str:
    """Read a file of UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFileError(str(error)) from None


def parse_json(text: bytes) -> Any:
    """Parse JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also of bytes that are no UTF-8
        raise DamagedFileError("it is not JSON") from None


def parse_yaml(content: str, loader: Any = None) -> Any:
    """Parse YAML whose keys are text."""
    import yaml

    # The loader in C, if it was built, is ten times as fast.
    loader = loader or getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        found: Any = yaml.load(content, loader)
        _check_keys(found)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise DamagedFileError(f"{line}{error.problem}") from None
    except Exception as error:  # PyYAML has many for a value that is not of its tag, or in itself
        problem = " ".join(str(error).split()) or type(error).__name__
        raise DamagedFileError(problem) from None
    return found


def _check_keys(content: Any) -> None:
    if not isinstance(content, dict | list):
        return
    for key in content if isinstance(content, dict) else ():
        if not isinstance(key, str):
            raise DamagedFileError(f"the key {key!r:.40} is not text")
    for part in content.values() if isinstance(content, dict) else content:
        _check_keys(part)


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; raises DamagedFileError for other content."""
    content = parse_json(path.read_bytes())
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
