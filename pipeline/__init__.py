"""Input: sources, decoding, sharding and resume. Needs DALI or torchvision, and Pillow."""

from .audit.check import DataReport, check_data
from .decode.batch import Batch
from .decode.crops import IMAGENET_MEAN, IMAGENET_STD, Transform
from .decode.reader import ON_ERROR
from .errors import DataError
from .loader import BACKENDS, Loader
from .prepare import Output, prepare_cifar10, prepare_digits, prepare_folder, prepare_imagenet
from .progress import Progress
from .sources import (
    SHARD_FORMATS,
    ImageFolder,
    ImageSource,
    Index,
    Retries,
    Shards,
    Source,
    Subset,
    Synthetic,
    hold_out,
    index_shards,
)
from .stages import Phase, Stage, StageTimeline, lay_out

__all__ = [
    "BACKENDS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "ON_ERROR",
    "SHARD_FORMATS",
    "Batch",
    "DataError",
    "DataReport",
    "ImageFolder",
    "ImageSource",
    "Index",
    "Loader",
    "Output",
    "Phase",
    "Progress",
    "Retries",
    "Shards",
    "Source",
    "Stage",
    "StageTimeline",
    "Subset",
    "Synthetic",
    "Transform",
    "check_data",
    "hold_out",
    "index_shards",
    "lay_out",
    "prepare_cifar10",
    "prepare_digits",
    "prepare_folder",
    "prepare_imagenet",
]
