"""Sources of images, one module per kind, and the index of shards."""

from .base import EXTENSIONS, Encoded, ImageSource, is_image_name
from .faults import LeftOut, OnFault
from .folder import ImageFolder
from .shards.dataset import Shards
from .shards.index import INDEX_FILE, Index
from .shards.indexing import SCANNERS, index_shards
from .storage.retries import Retries
from .subset import Subset, hold_out
from .synthetic import Synthetic

#: Formats of shards that can be read.
SHARD_FORMATS = tuple(SCANNERS)

#: Sources that a loader accepts.
Source = ImageSource | Synthetic

__all__ = [
    "EXTENSIONS",
    "INDEX_FILE",
    "SHARD_FORMATS",
    "Encoded",
    "ImageFolder",
    "ImageSource",
    "Index",
    "LeftOut",
    "OnFault",
    "Retries",
    "Shards",
    "Source",
    "Subset",
    "Synthetic",
    "hold_out",
    "index_shards",
    "is_image_name",
]
