"""The entry of the command ``largebatch``. Imports nothing but the standard library itself."""

from __future__ import annotations

from ..errors import exit_on_missing_package


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a missing package gives exit code 2 and one line.

    Args:
        arguments: The words after ``largebatch``; None: those of this process.
    """
    with exit_on_missing_package():
        from .tree import app

        app(arguments, prog_name="largebatch")
