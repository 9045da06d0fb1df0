"""What a data set is written as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import DataError
from ..progress import default_workers
from .writers import SHARD_FORMATS

#: What a data set can be written as.
FORMATS = ("folder", *SHARD_FORMATS)


@dataclass(frozen=True)
class Output:
    """What a data set is written as.

    Attributes:
        format: ``folder`` (``train/<class>/<image>``), or shards for fast sequential reading:
            ``webdataset`` (tar) or ``tfrecord``. MXNet RecordIO is read but not written.
        shard_bytes: images are dealt to shards in equal numbers, so that a shard has about so many
            bytes, counted before images are made smaller.
        images_per_shard: that many images in each shard instead; at most one less.
        resize: images whose shorter side is longer than so many pixels are made smaller to it, and
            encoded as JPEG again; None leaves every image as it is, byte by byte.
        quality: of JPEG, 1 to 100, where images are encoded.
        seed: of the order in which training images are put into shards, >= 0: programs that read
            shards front to back meet the classes mixed. Validation images stay in order.
        workers: threads; default: one per core.

    Raises:
        DataError: a value is impossible.
    """

    format: str = "folder"
    shard_bytes: int = 256 * 2**20
    images_per_shard: int | None = None
    resize: int | None = None
    quality: int = 90
    seed: int = 0
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise DataError(f"unknown format {self.format!r}; valid: {', '.join(FORMATS)}")
        for name, least in (
            ("shard_bytes", 1),
            ("images_per_shard", 1),
            ("resize", 1),
            ("quality", 1),
            ("seed", 0),
            ("workers", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DataError(f"{name} is {value}; it must be at least {least}")
        if self.quality > 100:
            raise DataError(f"quality is {self.quality}; it must be at most 100")

    @property
    def sharded(self) -> bool:
        """Whether images are put into shards."""
        return self.format != "folder"

    @property
    def threads(self) -> int:
        """How many to use."""
        return self.workers or default_workers()

    def settings(self) -> dict[str, Any]:
        """What decides the bytes that are written."""
        found: dict[str, Any] = {"format": self.format, "resize": self.resize}
        if self.resize is not None:
            found["quality"] = self.quality
        if self.sharded:
            found["seed"] = self.seed
            if self.images_per_shard is not None:
                found["images_per_shard"] = self.images_per_shard
            else:
                found["shard_bytes"] = self.shard_bytes
        return found
