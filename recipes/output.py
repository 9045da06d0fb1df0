"""What commands print as tables of numbers, and write by templates and where ``--out`` says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from .errors import RecipeError

if TYPE_CHECKING:
    from jinja2 import Template


def console(width: int = 160) -> Console:
    """A console that wraps no line; in a file or a pipe, tables are at most ``width`` wide."""
    found = Console(highlight=False, soft_wrap=True)
    if not found.is_terminal:
        found.width = width
    return found


def table(*columns: str, words: int | None = 0, title: str | None = None) -> Table:
    """A table of numbers, one column of which has ``words``."""
    found = Table(box=None, pad_edge=False, title=title)
    for index, column in enumerate(columns):
        found.add_column(column, justify="left" if index == words else "right")
    return found


def template(package: str | None, name: str, **options: Any) -> Template:
    """A template beside the modules of a package, in which all names must be defined."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    options |= {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=PackageLoader(package or "", ""), **options).get_template(name)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Name the file or folder of ``--out`` in one line if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise RecipeError(f"--out: cannot write {place}: {error.strerror or error}") from None
