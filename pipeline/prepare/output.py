"""The format in which a data set is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import DataError
from ..progress import default_workers

#: Formats in which a data set can be written.
FORMATS = ("folder", "webdataset")


@dataclass(frozen=True)
class Output:
    """The format in which a data set is written.

    Raises:
        DataError: A value is out of range, or the format is unknown.
    """

    #: ``folder`` (``train/<class>/<image>``), or ``webdataset``, tar shards for fast sequential
    #: reading.
    format: str = "folder"
    #: Approximate size of a shard, before images are made smaller. All shards of a split hold the
    #: same number of images, or one less.
    shard_bytes: int = 256 * 2**20
    images_per_shard: int | None = None  #: Or one less; overrides ``shard_bytes``.
    #: Images whose shorter side is longer than this number of pixels are resized to it and encoded
    #: as JPEG; None keeps the bytes of every image.
    resize: int | None = None
    quality: int = 90  #: JPEG quality, 1 to 100, of the images that are encoded.
    #: Seed, >= 0, of the order of training images in shards, so that sequential readers see the
    #: classes mixed. Validation images stay in order.
    seed: int = 0
    workers: int | None = None  #: Number of threads, by default one per core.

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise DataError(f"unknown format {self.format!r}; valid: {', '.join(FORMATS)}")
        for name in ("shard_bytes", "images_per_shard", "resize", "quality", "seed", "workers"):
            value, least = getattr(self, name), int(name != "seed")
            if value is not None and value < least:
                raise DataError(f"{name}: {value} is too small; valid: at least {least}")
        if self.quality > 100:
            raise DataError(f"quality: {self.quality} is too large; valid: at most 100")

    @property
    def sharded(self) -> bool:
        """Whether images are written to shards."""
        return self.format != "folder"

    @property
    def threads(self) -> int:
        """Number of worker threads."""
        return self.workers or default_workers()

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the bytes written."""
        found: dict[str, Any] = {"format": self.format, "resize": self.resize}
        if self.resize is not None:
            found["quality"] = self.quality
        if self.sharded:
            size = "shard_bytes" if self.images_per_shard is None else "images_per_shard"
            found |= {"seed": self.seed, size: getattr(self, size)}
        return found
