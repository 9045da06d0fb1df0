"""Input: sources, decoding, sharding over ranks and resume.

It needs nvImageCodec, DALI or torchvision to decode images, and Pillow.
"""

from typing import TYPE_CHECKING

from .._lazy import lazily

if TYPE_CHECKING:
    from .audit import DataReport, check_data
    from .decode.batch import Batch
    from .decode.crops import IMAGENET_MEAN, IMAGENET_STD, INTERPOLATIONS, Transform
    from .decode.options import BACKENDS, ON_ERROR, VERIFY
    from .decode.policy import check_auto_augment
    from .errors import DataError, printable
    from .loader import Loader
    from .prepare import Output, prepare_cifar10, prepare_digits, prepare_folder, prepare_imagenet
    from .progress import Progress, ProgressCallback
    from .sources import (
        INDEX_FILE,
        SHARD_FORMATS,
        ImageFolder,
        ImageSource,
        Index,
        LeftOut,
        OnFault,
        Retries,
        Shards,
        Source,
        Subset,
        Synthetic,
        hold_out,
        index_shards,
    )
    from .sources.storage.urls import check_secrets, without_query, without_secrets
    from .stages import Phase, Stage, StageTimeline, lay_out
    from .stalls import INPUT_BOUND, InputTimes, measure_input_times, stall_advice
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = [
    "BACKENDS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "INDEX_FILE",
    "INPUT_BOUND",
    "INTERPOLATIONS",
    "ON_ERROR",
    "SHARD_FORMATS",
    "VERIFY",
    "Batch",
    "DataError",
    "DataReport",
    "ImageFolder",
    "ImageSource",
    "Index",
    "InputTimes",
    "LeftOut",
    "Loader",
    "OnFault",
    "Output",
    "Phase",
    "Progress",
    "ProgressCallback",
    "Retries",
    "Shards",
    "Source",
    "Stage",
    "StageTimeline",
    "Subset",
    "Synthetic",
    "Transform",
    "check_auto_augment",
    "check_data",
    "check_secrets",
    "hold_out",
    "index_shards",
    "lay_out",
    "measure_input_times",
    "prepare_cifar10",
    "prepare_digits",
    "prepare_folder",
    "prepare_imagenet",
    "printable",
    "stall_advice",
    "without_query",
    "without_secrets",
]
