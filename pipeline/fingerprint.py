"""What a checkpoint of the input must have in common with the loader that takes it up."""

from __future__ import annotations

from typing import Any

from .errors import DataError

#: Of the order of images and of their random numbers.
ORDER_VERSION = 2

_RESHARDED = ("world_size", "batch_size", "micro_batch_size")


def check(saved: dict[str, Any], now: dict[str, Any], *, reshard: bool) -> None:
    """See that the order of images is that of the checkpoint.

    Args:
        saved: facts that the order depends on, from the checkpoint.
        now: the same of the loader.
        reshard: whether ranks and batches may differ.

    Raises:
        DataError: names the first difference, and what would be valid.
    """
    for key, value in now.items():
        if saved.get(key) == value:
            continue
        difference = f"the input was saved with {key} {saved.get(key)}, now it is {value}"
        if key not in _RESHARDED:
            raise DataError(f"{difference}: the order of images would not be the same")
        if not reshard:
            raise DataError(
                f"{difference}; resume.reshard=true goes on with the images not yet seen"
            )


def changes(saved: dict[str, str], now: dict[str, str]) -> list[str]:
    """What else is other: it changes no order, but may change the last bit of pixels."""
    return [
        f"{what} is now {value}, was {saved.get(what)}: pixels may differ in their last bit"
        for what, value in now.items()
        if saved.get(what) != value
    ]
