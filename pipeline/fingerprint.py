"""What a checkpoint of the input must have in common with the loader that resumes from it."""

from __future__ import annotations

from typing import Any

from .errors import DataError

#: Version of the order of images and of their random numbers.
ORDER_VERSION = 2

_RESHARDED = ("world_size", "batch_size", "micro_batch_size")


def check(state: dict[str, Any], now: dict[str, Any], *, reshard: bool) -> int:
    """Check that the order of images is that of the checkpoint, and return its position.

    A DataError names the first difference; ``reshard`` allows other ranks and batch sizes.
    """
    names = ("fingerprint", "made_with", "position")
    saved, made_with, position = (
        state.get(name) if isinstance(state, dict) else None for name in names
    )
    if not (isinstance(saved, dict) and isinstance(made_with, dict) and type(position) is int):
        raise DataError("the state of the input is damaged; valid: one of Loader.state_dict()")
    if not 0 <= position < 2**63:
        raise DataError("the state of the input has no position; valid: from 0 up to 2**63")
    saved = {"repeats": 1} | saved  # which earlier versions did not have
    for key, value in now.items():
        if saved.get(key) == value:
            continue
        difference = f"the input was saved with {key} {saved.get(key)}, now it is {value}"
        if key not in _RESHARDED:
            raise DataError(f"{difference}: the order of images would not be the same")
        if not reshard:
            raise DataError(
                f"{difference}; resume.reshard=true continues with the images not yet seen"
            )
    return position


def changes(saved: dict[str, str], now: dict[str, str]) -> list[str]:
    """List the differences that keep the order but may change the last bit of pixels."""
    return [
        f"{key} is now {value}, was {saved.get(key)}: pixels may differ in their last bit"
        for key, value in now.items()
        if saved.get(key) != value
    ]
