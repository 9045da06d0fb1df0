"""Where images come from: one file per source, and the index that sharded ones share."""

from .base import Encoded, ImageSource
from .folder import EXTENSIONS, ImageFolder
from .shards.index import INDEX, Index
from .shards.indexing import SCANNERS, index_shards
from .shards.source import Shards
from .storage.retries import Retries
from .subset import Subset, hold_out
from .synthetic import Synthetic

#: Formats of shards.
SHARD_FORMATS = tuple(SCANNERS)

#: What a loader takes.
Source = ImageSource | Synthetic

__all__ = [
    "EXTENSIONS",
    "INDEX",
    "SHARD_FORMATS",
    "Encoded",
    "ImageFolder",
    "ImageSource",
    "Index",
    "Retries",
    "Shards",
    "Source",
    "Subset",
    "Synthetic",
    "hold_out",
    "index_shards",
]
