"""What a user got wrong, told in one line with exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from ..comm import PlanError, TopologyError
from ..pipeline import DataError


class RecipeError(Exception):
    """A recipe, an override or a machine that does not fit; the message is for the user."""


class AgreedError(RecipeError):
    """An error that all ranks raise together, so that one of them tells it for all."""


class TrainingError(AgreedError):
    """A run that cannot go on, though nothing was wrong with what it was given."""


#: Errors whose message is meant for the user, and stands without a traceback.
USER_ERRORS = (RecipeError, DataError, PlanError, TopologyError)


def did_you_mean(name: str, valid: list[str]) -> str:
    """``"; did you mean 'x'?"`` where one of ``valid`` is close to ``name``, else nothing."""
    close = get_close_matches(name, valid, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def but_valid(name: str, valid: list[str]) -> str:
    """What leads from an unknown name to those that are valid, with a suggestion if there is one.

    ``"; did you mean 'x'? Valid"`` or ``"; valid"``.
    """
    hint = did_you_mean(name, valid)
    return f"{hint} Valid" if hint else "; valid"


@contextmanager
def exit_on_user_error(speaks: Callable[[Exception], bool] = lambda error: True) -> Iterator[None]:
    """Turn :data:`USER_ERRORS` into exit code 2, and one line if this process ``speaks``.

    A :class:`TrainingError` gives exit code 1.
    """
    try:
        yield
    except USER_ERRORS as error:
        if speaks(error):
            print(f"largebatch: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, TrainingError) else 2) from None
