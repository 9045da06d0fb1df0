"""Units of work: the images of a shard, or some of a folder, written together.

Which images are in a unit, and so its bytes, follows from the settings alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..order import epoch_order
from .images import Images
from .output import Output
from .writers import ShardFormat

_FILES_PER_UNIT = 256
_JPEG = (".jpeg", ".jpg")


@dataclass(frozen=True, eq=False)
class Unit:
    """Images that are written together.

    Attributes:
        images: of the whole split.
        names: of all images of the split, as they will be called unless encoded again.
        number: of the unit in the split.
        first: the place of its first image among all of the split as they are written.
        numbers: of its images in the order they are written, int64, shape ``[n]``.
    """

    images: Images
    names: list[str]
    number: int
    first: int
    numbers: NDArray[np.int64]

    @property
    def title(self) -> str:
        """Names it, and its shard."""
        return f"{self.images.split}-{self.number:05d}"

    @property
    def bytes(self) -> int:
        """Of its images as they are read."""
        return int(self.images.sizes[self.numbers].sum())


def units_of(images: Images, output: Output, form: ShardFormat | None) -> Iterator[Unit]:
    """All units of a split.

    Args:
        images: of the split.
        output: how they are written.
        form: of shards; None for folders.

    Raises:
        DataError: two images would get the same name.
    """
    names = _names(images, output, form)
    count = len(images)
    if form is None:
        order, units = np.arange(count), -(-count // _FILES_PER_UNIT)
    else:
        order = epoch_order(count, output.seed, 0) if images.split == "train" else np.arange(count)
        if output.images_per_shard is not None:
            units = -(-count // output.images_per_shard)
        else:
            units = max(1, min(count, -(-int(images.sizes.sum()) // output.shard_bytes)))
    first = 0
    for number, numbers in enumerate(np.array_split(order, units)):
        yield Unit(images, names, number, first, numbers)
        first += len(numbers)


def _names(images: Images, output: Output, form: ShardFormat | None) -> list[str]:
    """What images will be called if they are not encoded again; no two may end up alike."""
    names = images.names if form is None else [form.name(name) for name in images.names]
    keys = dict[str, str]()
    for original, name in zip(images.names, names, strict=True):
        possible = {name, as_jpeg(name)} if output.resize is not None else {name}
        for key in {form.key(n) for n in possible} if form else possible:
            if keys.setdefault(key, original) != original:
                raise DataError(
                    f"{images.split}/{keys[key]} and {images.split}/{original} would both be "
                    f"{key} in format={output.format}: rename one"
                )
    return names


def as_jpeg(name: str) -> str:
    """The name of an image after it was encoded as JPEG."""
    return name if name.lower().endswith(_JPEG) else f"{name.rpartition('.')[0]}.jpeg"
