"""Writers of shards, one file per format."""

from collections.abc import Callable

from .base import PlacedRecord, Record, Sample, ShardFormat
from .tfrecord import TFRecord
from .webdataset import WebDataset

#: Formats of shards that can be written, by name. MXNet RecordIO is read but not written.
SHARD_FORMATS: dict[str, Callable[[], ShardFormat]] = {
    "webdataset": WebDataset,
    "tfrecord": TFRecord,
}

__all__ = ["SHARD_FORMATS", "PlacedRecord", "Record", "Sample", "ShardFormat"]
