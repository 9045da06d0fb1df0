"""Tables of numbers, and the console on which commands print them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


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
