"""Units of work: the images of a shard, or a batch of files, which are written together.

The images of a unit, and hence its bytes, depend on the settings alone.
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
        images: The images of the whole split.
        names: Names under which the images of the split are written, unless they are re-encoded.
        number: Number of the unit in its split.
        numbers: Numbers of its images in the order of writing, int64, shape ``[n]``.
    """

    images: Images
    names: list[str]
    number: int
    numbers: NDArray[np.int64]

    @property
    def title(self) -> str:
        """Name of the unit and of its shard."""
        return f"{self.images.split}-{self.number:05d}"

    @property
    def bytes(self) -> int:
        """Total size in bytes of its images as they are read."""
        return int(self.images.sizes[self.numbers].sum())


def units_of(images: Images, output: Output, shard_format: ShardFormat | None) -> Iterator[Unit]:
    """Yield the units of a split.

    Args:
        images: The images of the split.
        output: The format to write.
        shard_format: The format of shards; None for class folders.

    Raises:
        DataError: Two images would get the same name.
    """
    names = _names(images, output, shard_format)
    count = len(images)
    if shard_format is None:
        order, units = np.arange(count), -(-count // _FILES_PER_UNIT)
    else:
        order = epoch_order(count, output.seed, 0) if images.split == "train" else np.arange(count)
        if output.images_per_shard is not None:
            units = -(-count // output.images_per_shard)
        else:
            units = max(1, min(count, -(-int(images.sizes.sum()) // output.shard_bytes)))
    for number, numbers in enumerate(np.array_split(order, units)):
        yield Unit(images, names, number, numbers)


def _names(images: Images, output: Output, shard_format: ShardFormat | None) -> list[str]:
    """Return the names of images that are not re-encoded, after checking for duplicates."""
    names = (
        images.names if shard_format is None else [shard_format.name(name) for name in images.names]
    )
    keys = dict[str, str]()
    for original, name in zip(images.names, names, strict=True):
        possible = {name, jpeg_name(name)} if output.resize is not None else {name}
        for key in {shard_format.key(n) for n in possible} if shard_format else possible:
            if keys.setdefault(key, original) != original:
                raise DataError(
                    f"{images.split}/{keys[key]} and {images.split}/{original} would both be "
                    f"{key} in format={output.format}: rename one"
                )
    return names


def jpeg_name(name: str) -> str:
    """Return the name of an image after it has been encoded as JPEG."""
    return name if name.lower().endswith(_JPEG) else f"{name.rpartition('.')[0]}.jpeg"
