"""The report of an error on several ranks: one of them prints it, and torchrun learns the cause."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import LostRankError, RecipeError, exit_on_user_error, user_errors

#: How long ranks that do not report an error wait for the one that does.
_SECONDS_TO_REPORT = 20


@contextmanager
def reported_once(reports: Callable[[Exception], bool]) -> Iterator[None]:
    """Exit with one line for an error that the user can fix, printed by the rank that reports it.

    torchrun ends all processes of a machine as soon as one has ended. So the other ranks wait for
    that, or the one that reports could be ended before it has printed anything. A rank that is
    still there after that reports the error itself, as it may be the only one that has it. Where a
    rank is lost, torchrun is ending the others already. Any other exception is raised at once.

    The rank that reports also passes its message to torchrun, which shows it as the root cause at
    the end of its own report, instead of the advice to look for a traceback. That report cannot be
    suppressed from here.

    Args:
        reports: Whether this rank reports an error that the user can fix.
    """
    has_waited = False
    with exit_on_user_error(lambda error: has_waited or reports(error)):
        try:
            yield
        except Exception as error:
            is_for_user = isinstance(error, user_errors())
            others = is_for_user and not reports(error) and not isinstance(error, LostRankError)
            if others and "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(_SECONDS_TO_REPORT)
                has_waited = True
            if not is_for_user or has_waited or reports(error):
                kind = "" if isinstance(error, RecipeError) else f"{type(error).__name__}: "
                pass_to_torchrun(f"{kind}{error}")
            raise


def pass_to_torchrun(message: str) -> None:
    """Write the file from which torchrun reads the error of a process.

    It has the form of torch.distributed.elastic.multiprocessing.errors.ErrorHandler.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(path, "w") as file:  # such as on a full disk
            json.dump({"message": about}, file)


def remove_empty_folders() -> None:
    """Remove torchrun's folder for the error of this process, if it has none, and those above.

    torchrun makes them anew in the temporary folder for each job, and leaves them there. The last
    process of a machine finds those above empty.
    """
    folder = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent
    with suppress(OSError):  # it is not empty
        while any(path.name.startswith("torchelastic_") for path in (folder, *folder.parents)):
            folder.rmdir()
            folder = folder.parent
