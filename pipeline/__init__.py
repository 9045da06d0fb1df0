"""Input: sources, decoding, sharding and resume. Needs DALI or torchvision, and Pillow."""

from .batch import Batch
from .errors import DataError
from .geometry import IMAGENET_MEAN, IMAGENET_STD, Transform
from .loader import BACKENDS, Loader
from .prepare import prepare_digits
from .reading import ON_ERROR
from .sources import (
    ImageFolder,
    ImageSource,
    Index,
    Retries,
    Shards,
    Source,
    Synthetic,
    index_shards,
)
from .stages import Stage

__all__ = [
    "BACKENDS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "ON_ERROR",
    "Batch",
    "DataError",
    "ImageFolder",
    "ImageSource",
    "Index",
    "Loader",
    "Retries",
    "Shards",
    "Source",
    "Stage",
    "Synthetic",
    "Transform",
    "index_shards",
    "prepare_digits",
]
