"""Decoding crops with nvImageCodec and resizing them with torch.

nvImageCodec, which DALI is built on, decodes with libjpeg-turbo only the part of a JPEG file that a
crop needs. torch's antialiased resizing of 8-bit images follows Pillow's, with vector instructions.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..sources import Encoded
from .batch import Request
from .pillow import decode
from .threads import ThreadedBackend

#: The first release whose Python API and colour conversion are those used here.
OLDEST = "0.9"

# nvImageCodec's NVIMGCODEC_DEVICE_CPU_ONLY.
_NO_GPU = -99999
# torch works on fewer elements than this on the calling thread (at::internal::GRAIN_SIZE); with
# more it would start a team of OpenMP threads in each decoding thread.
_GRAIN = 32768


class NvimgcodecBackend(ThreadedBackend):
    """Decodes with nvImageCodec and torch, and with Pillow what nvImageCodec cannot decode."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._decoders = _Decoders()

    @property
    def version(self) -> str:
        """Versions of nvImageCodec and of torch."""
        return f"{_library().__version__}, torch {torch.__version__}"

    def _levels(self, request: Request, i: int) -> NDArray[np.uint8]:
        crop = request.crop
        (width, height), (left, top) = crop.resized[i].tolist(), crop.corner[i].tolist()
        region = torch.from_numpy(self._region(request, i))[None].permute(0, 3, 1, 2)
        resized = torch.nn.functional.interpolate(
            region, size=(height, width), mode=self._interpolation, antialias=True
        )
        levels = resized[0].permute(1, 2, 0).numpy()
        levels = _window(levels, left, top, request.image_size)
        return _mirror(levels) if crop.mirrored[i] else levels

    def _region(self, request: Request, i: int) -> NDArray[np.uint8]:
        x, y, width, height = request.crop.region[i].tolist()
        content = request.contents[i]
        region = self._decoders.region(content, x, y, width, height)
        if region is None:
            region = np.array(decode(content))[y : y + height, x : x + width]
        if region.shape != (height, width, 3):
            name = self._reader.source.name(int(request.indices[i]))
            raise ValueError(f"{name} has another size than its header states")
        return region


class _Decoders(threading.local):
    """nvImageCodec's decoder of each thread, since threads cannot share one."""

    def __init__(self) -> None:
        self._library = library = _library()
        self._decoder = library.Decoder(
            device_id=_NO_GPU,
            max_num_cpu_threads=1,
            backends=[library.Backend(library.BackendKind.CPU_ONLY)],
            options=":fancy_upsampling=1",  # as other CPU decoders do
        )
        self._params = library.DecodeParams(
            apply_exif_orientation=False, color_spec=library.ColorSpec.SRGB
        )

    def region(
        self, content: Encoded, x: int, y: int, width: int, height: int
    ) -> NDArray[np.uint8] | None:
        """Decode a region to RGB, ``[height, width, 3]``; None if it cannot be decoded."""
        region = self._library.Region(y, x, y + height, x + width)
        try:
            part = self._library.CodeStream(content).get_sub_code_stream(region=region)
            image = self._decoder.decode(part, params=self._params)
        except RuntimeError:  # of an unknown format
            return None
        return None if image is None else np.asarray(image)


def is_installed() -> bool:
    """Whether nvImageCodec is installed, in a release that can be used."""
    try:
        if importlib.util.find_spec("nvidia.nvimgcodec") is None:
            return False
        version = str(_library().__version__)
    except (ImportError, OSError):
        return False
    return _numbers(version) >= _numbers(OLDEST)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _library() -> Any:
    # Its messages about an image name no file, and Pillow's verdict follows.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    from nvidia import nvimgcodec

    return nvimgcodec


def _window(levels: NDArray[np.uint8], left: int, top: int, size: int) -> NDArray[np.uint8]:
    """Return a square part of an image; what lies outside of the image is black."""
    inside = levels[max(top, 0) : top + size, max(left, 0) : left + size]
    height, width, _ = inside.shape
    if (height, width) == (size, size):
        return inside
    padded = np.zeros((size, size, 3), np.uint8)
    above, before = max(-top, 0), max(-left, 0)
    padded[above : above + height, before : before + width] = inside
    return padded


def _mirror(levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Flip an image horizontally, in parts, with torch: NumPy takes several times as long."""
    rows = max(1, (_GRAIN - 1) // levels[0].size)
    parts = torch.from_numpy(levels).permute(2, 0, 1).split(rows, 1)
    return np.concatenate([part.flip(2).permute(1, 2, 0).numpy() for part in parts])
