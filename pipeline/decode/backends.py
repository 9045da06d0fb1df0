"""The choice of a decoding backend."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from ..errors import DataError
from . import nvimgcodec
from .batch import MemoryLayout
from .crops import Transform
from .dali import HOPPER_PREFETCH, DaliBackend, is_hopper
from .nvimgcodec import NvimgcodecBackend
from .options import BACKENDS
from .reader import Reader
from .torchvision import TorchvisionBackend

Backend = DaliBackend | NvimgcodecBackend | TorchvisionBackend

_PREFETCH = 2
# Measured by benchmarks/pipeline/input.py: below, the time that Python takes per image outweighs
# what nvImageCodec and torch gain over DALI on the CPU.
_LARGE = 192


def choose(
    name: str, device: torch.device, image_size: int, auto_augment: str | None = None
) -> str:
    """Return the backend that ``name`` stands for; a DataError says why it cannot be used.

    ``"auto"`` is the fastest that is installed: on a GPU DALI, on the CPU nvImageCodec for images
    of at least 192 pixels and DALI for smaller ones. DALI's ``auto_aug`` has other operations,
    levels and fills, and draws its own random numbers: it cannot show the same images.
    """
    on_gpu, dali = device.type == "cuda", _has_dali() and auto_augment is None
    if name == "auto":
        if on_gpu and dali:
            return "dali-gpu"
        if not on_gpu and dali and image_size < _LARGE:
            return "dali-cpu"
        if nvimgcodec.is_installed():
            return "nvimgcodec"
        name = "dali-cpu" if dali else "torchvision"
    if name not in BACKENDS:
        raise DataError(f"unknown backend {name!r}; valid: auto, {', '.join(BACKENDS)}")
    if name == "dali-gpu" and not on_gpu:
        raise DataError(
            f"backend dali-gpu needs a CUDA device, not {device}; "
            "valid: nvimgcodec, dali-cpu, torchvision"
        )
    if name.startswith("dali") and auto_augment is not None:
        raise DataError(
            f"data.auto_augment: backend {name} does not have {auto_augment}; "
            "valid: data.backend=torchvision, or nvimgcodec"
        )
    if name == "torchvision":
        needs, package = "torchvision and Pillow", "largebatch[recipes]' or 'largebatch[cuda13]"
        there = _installed("torchvision") and _installed("PIL")
    elif name == "nvimgcodec":
        needs, package = f"nvidia.nvimgcodec {nvimgcodec.OLDEST} or later", "largebatch[cuda13]"
        there = nvimgcodec.is_installed()
    else:
        needs, package, there = "nvidia.dali", "largebatch[cuda13]", _has_dali()
    if not there:
        raise DataError(
            f"backend {name} needs {needs}, which is not installed: pip install '{package}'"
        )
    return name


def default_prefetch(name: str, device: torch.device) -> int:
    """Number of batches that the backend called ``name`` prepares in advance by default."""
    return HOPPER_PREFETCH if name == "dali-gpu" and is_hopper(device) else _PREFETCH


def make(
    name: str,
    reader: Reader,
    transform: Transform,
    layout: MemoryLayout,
    *,
    max_batch: int,
    hw_decoder_load: float | None,
    **options: Any,
) -> Backend:
    """Return the backend called ``name``, from :func:`choose`; two arguments are for DALI alone."""
    if name.startswith("dali"):
        options |= {"max_batch": max_batch, "hw_decoder_load": hw_decoder_load}
        return DaliBackend(reader, transform, layout, gpu=name == "dali-gpu", **options)
    kind = NvimgcodecBackend if name == "nvimgcodec" else TorchvisionBackend
    return kind(reader, transform, layout, **options)


def _has_dali() -> bool:
    return _installed("nvidia.dali")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
