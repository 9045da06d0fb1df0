"""The packages of trackers, which are needed only where a recipe asks for them."""

from __future__ import annotations

from importlib.util import find_spec

from ...errors import RecipeError
from ...ranks import Job


def check_installed(package: str, extra: str, job: Job) -> None:
    """Check on rank 0 that a tracker's package is installed.

    Args:
        package: Name by which it is imported.
        extra: Extra of largebatch that brings it.
        job: The processes of the run.

    Raises:
        RecipeError: It is not; the message has the command that installs it.
    """
    if job.is_main and find_spec(package) is None:
        raise RecipeError(
            f"track: {package} is not installed; valid: pip install 'largebatch[{extra}]', or "
            f"track without {package}"
        )
