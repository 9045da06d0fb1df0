"""Import a package's public names on first use (PEP 562).

A recipe can then be checked, and a command complete itself, without loading torch. The names are
those that the package's ``__init__.py`` imports ``if TYPE_CHECKING``: type checkers read them
there, and :func:`lazily` too, as ``lazy_loader`` reads a stub file.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Its ``__name__``.
        file: Its ``__file__``, in which each import below ``if TYPE_CHECKING`` is relative.
    """
    modules = {
        alias.name: f".{statement.module}"
        for block in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def get(name: str) -> Any:
        """Import a public name on first use."""
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})
