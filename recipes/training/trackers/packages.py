"""The packages of trackers, which are needed only if a recipe names the tracker."""

from __future__ import annotations

import importlib.util

from ...errors import RecipeError
from ...ranks import Job


def check_installed(package: str, extra: str, job: Job) -> None:
    """Check on rank 0 that a tracker's package is installed.

    Args:
        package: Name under which the package is imported.
        extra: Extra of largebatch that installs it.
        job: The processes of the run.

    Raises:
        RecipeError: The package is missing; the message has the command that installs it.
    """
    if job.is_main and importlib.util.find_spec(package) is None:
        raise RecipeError(
            f"track: {package} is not installed; valid: pip install 'largebatch[{extra}]', or "
            f"track without {package}"
        )
