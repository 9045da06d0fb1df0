"""Preparing data sets: they are written as class folders or as shards, one module per data set."""

from .cifar10 import prepare_cifar10
from .digits import prepare_digits
from .folder import prepare_folder
from .imagenet import prepare_imagenet
from .output import FORMATS, Output

__all__ = [
    "FORMATS",
    "Output",
    "prepare_cifar10",
    "prepare_digits",
    "prepare_folder",
    "prepare_imagenet",
]
