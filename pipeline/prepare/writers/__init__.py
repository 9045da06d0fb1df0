"""Writers of shards, one file per format."""

from collections.abc import Callable

from .base import PlacedRecord, Record, Sample, ShardFormat
from .webdataset import WebDataset

#: Formats of shards that can be written, by name. TFRecord and RecordIO are read but not written.
SHARD_FORMATS: dict[str, Callable[[], ShardFormat]] = {"webdataset": WebDataset}

__all__ = ["SHARD_FORMATS", "PlacedRecord", "Record", "Sample", "ShardFormat"]
