"""What a checkpoint of the input must have in common with the loader that resumes from it."""

from __future__ import annotations

from typing import Any

from .errors import DataError

#: Version of the order of images and of their random numbers.
ORDER_VERSION = 2

_RESHARDED = ("world_size", "batch_size", "micro_batch_size")


def check(saved: dict[str, Any], now: dict[str, Any], *, reshard: bool) -> None:
    """Check that the facts on which the order of images depends are those of the checkpoint.

    With ``reshard`` the number of ranks and the batch sizes may differ.

    Raises:
        DataError: A fact differs; the message names the first one and what is valid.
    """
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


def changes(saved: dict[str, str], now: dict[str, str]) -> list[str]:
    """List the differences that keep the order but may change the last bit of pixels."""
    return [
        f"{key} is now {value}, was {saved.get(key)}: pixels may differ in their last bit"
        for key, value in now.items()
        if saved.get(key) != value
    ]
