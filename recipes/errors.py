"""Errors that a user can fix, reported in one line with exit code 2.

This module imports nothing heavy, so that the command line can use it before torch is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from ..pipeline import printable

#: The errors of the other subpackages that are meant for the user: module and name.
_ROOM_ERRORS = (
    ("pipeline.errors", "DataError"),
    ("comm.plan", "PlanError"),
    ("comm.topology", "TopologyError"),
)

#: What ``largebatch[recipes]`` installs, as it is imported.
_PACKAGES = (
    *("filelock", "google_crc32c", "huggingface_hub", "jinja2", "matplotlib", "optuna", "PIL"),
    *("plotly", "pydantic", "yaml", "rich", "safetensors", "sklearn", "scipy", "simplejpeg"),
    *("tensorboard", "timm", "torchvision", "typer"),
)


class RecipeError(Exception):
    """Raised for an invalid recipe or override, or a machine that cannot run it.

    ``problem`` is the message, written for the user; ``advice``, what they can do, follows it.
    """

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__("; ".join(filter(None, (problem, advice))))
        self.problem = problem


class AgreedError(RecipeError):
    """Raised by all ranks together, so that one of them can report it for all."""


class TrainingError(AgreedError):
    """Raised when a run has to stop although its recipe and data are valid."""


class LostRankError(RecipeError):
    """Raised on the ranks that are left when one has ended, hangs or is cut off."""

    def __init__(self, problem: str, is_first: bool, advice: str = "") -> None:
        super().__init__(problem, advice)
        self.is_first = is_first


class StorageError(TrainingError):
    """Raised when a run has to stop because its files cannot be written."""


def is_reported_here(error: Exception) -> bool:
    """Whether this rank reports an error: rank 0 does one that all raise, each rank its own."""
    if isinstance(error, LostRankError):
        return error.is_first
    return os.environ.get("RANK", "0") == "0" or not isinstance(error, AgreedError)


def user_errors() -> tuple[type[Exception], ...]:
    """Exception types whose message is shown to the user without a traceback."""
    package = __name__.partition(".")[0]
    modules = ((sys.modules.get(f"{package}.{module}"), name) for module, name in _ROOM_ERRORS)
    found = (getattr(module, name, None) for module, name in modules)
    return (RecipeError, *(error for error in found if error is not None))


def missing_package(error: ModuleNotFoundError) -> str | None:
    """One line about a package of ``largebatch[recipes]`` that is not installed, else None."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        return None
    return f"{package} is not installed; valid: pip install 'largebatch[recipes]'"


@contextmanager
def exit_on_missing_package(when: bool = True) -> Iterator[None]:
    """Turn a missing package of ``largebatch[recipes]`` into exit code 2 and one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        line = missing_package(error)
        if line is None or not when:
            raise
        print(f"largebatch: error: {line}", file=sys.stderr)
        raise SystemExit(2) from None


def did_you_mean(name: str, valid: list[str], most: int = 1) -> str:
    """``"; did you mean 'x'?"`` if one of ``valid`` resembles ``name``, else an empty string."""
    return suggested(get_close_matches(name, valid, n=most))


def suggested(names: list[str]) -> str:
    """``"; did you mean 'x' or 'y'?"``; empty without names."""
    *others, last = map(repr, names or [""])
    either = " or ".join(filter(None, (", ".join(others), last)))
    return f"; did you mean {either}?" if names else ""


def but_valid(name: str, valid: list[str], most: int = 1) -> str:
    """The words between an unknown name and the list of valid ones."""
    hint = did_you_mean(name, valid, most)
    return f"{hint} Valid" if hint else "; valid"


@contextmanager
def exit_on_user_error(
    reports: Callable[[Exception], bool] = lambda error: True,
) -> Iterator[None]:
    """Turn :func:`user_errors` into exit code 2; a training that has to end, into 1."""
    try:
        yield
    except user_errors() as error:
        if reports(error):
            line = printable(" ".join(str(error).split()))
            print(f"largebatch: error: {line}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, TrainingError | LostRankError) else 2) from None
