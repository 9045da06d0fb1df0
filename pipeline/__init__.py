"""Input: sources, decoding, sharding and resume. Needs DALI or torchvision, and Pillow."""

from .batch import Batch
from .errors import DataError
from .geometry import IMAGENET_MEAN, IMAGENET_STD, Transform
from .loader import BACKENDS, Loader
from .prepare import prepare_digits
from .sources import ImageFolder, Source, Synthetic

__all__ = [
    "BACKENDS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Batch",
    "DataError",
    "ImageFolder",
    "Loader",
    "Source",
    "Synthetic",
    "Transform",
    "prepare_digits",
]
