"""The report of an error on several ranks: one of them prints it, and torchrun learns the cause."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import RecipeError, exit_on_user_error

#: How long ranks that do not report an error wait for the one that does.
_SECONDS_TO_REPORT = 20


@contextmanager
def reported_once(reports: Callable[[Exception], bool]) -> Iterator[None]:
    """Exit with one line for an error that the user can fix, printed by the rank that reports it.

    torchrun ends all processes of a machine as soon as one has ended. So the other ranks wait for
    that, or the one that reports could be ended before it has printed anything. It also passes its
    message to torchrun, which shows it as the root cause at the end of its own report, instead of
    the advice to look for a traceback. That report cannot be suppressed from here.

    Args:
        reports: Whether this rank reports an error.
    """
    with exit_on_user_error(reports):
        try:
            yield
        except Exception as error:
            if reports(error):
                kind = "" if isinstance(error, RecipeError) else f"{type(error).__name__}: "
                pass_to_torchrun(f"{kind}{error}")
            elif "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(_SECONDS_TO_REPORT)
            raise


def pass_to_torchrun(message: str) -> None:
    """Write the file from which torchrun reads the error of a process.

    It has the form of torch.distributed.elastic.multiprocessing.errors.ErrorHandler.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with open(path, "w") as file:
            json.dump({"message": about}, file)
