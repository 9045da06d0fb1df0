"""Writers of sharded formats: one file per format."""

from collections.abc import Callable

from .base import Entry, Placed, Record, ShardFormat
from .recordio import RecordIO
from .tfrecord import TFRecord
from .webdataset import WebDataset

#: Formats of shards, by name.
SHARD_FORMATS: dict[str, Callable[[], ShardFormat]] = {
    "webdataset": WebDataset,
    "tfrecord": TFRecord,
    "recordio": RecordIO,
}

__all__ = ["SHARD_FORMATS", "Entry", "Placed", "Record", "ShardFormat"]
