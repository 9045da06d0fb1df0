"""Decoding crops with nvImageCodec and resizing them with torch, on threads of the CPU.

nvImageCodec, which DALI is built on, decodes with libjpeg-turbo only the part of a JPEG file that a
crop needs. torch's antialiased resizing of 8-bit images follows Pillow's, with vector instructions.
Neither holds Python's global lock. Images stay 8-bit until they are where the model is: a GPU is
sent a quarter of the bytes of FP32 and normalises them itself.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..sources import Encoded
from .batch import Batch, DecodedBatch, MemoryLayout, Request, Upload, prefetch
from .crops import Transform
from .memory import BatchMemory
from .normalise import Normalisation
from .pillow import decode
from .reader import Reader

#: The first release whose Python API and colour conversion are those used here.
OLDEST = "0.9"

# nvImageCodec's NVIMGCODEC_DEVICE_CPU_ONLY.
_NO_GPU = -99999
# torch works on fewer elements than this on the calling thread (at::internal::GRAIN_SIZE); with
# more it would start a team of OpenMP threads in each decoding thread.
_GRAIN = 32768


class NvimgcodecBackend:
    """Decodes requests to batches with nvImageCodec and torch.

    An image that nvImageCodec cannot decode is decoded by Pillow, which decides whether it is
    usable.

    Args:
        reader: Makes requests again if an image cannot be decoded.
        transform: The transform of images.
        layout: Data type and memory format of images.
        device: Device of the batches.
        threads: Number of decoding threads.
        prefetch: Number of batches prefetched.
    """

    def __init__(
        self,
        reader: Reader,
        transform: Transform,
        layout: MemoryLayout,
        *,
        device: torch.device,
        threads: int,
        prefetch: int,
    ) -> None:
        self._reader = reader
        self._interpolation = transform.interpolation
        self._layout = layout
        self._normalisation = Normalisation(transform, layout)
        self._on_cpu = device.type == "cpu"
        self._upload = Upload(device, self._normalisation.batch)
        self._threads = threads
        self._prefetch = prefetch
        self._decoders = _Decoders()

    @property
    def version(self) -> str:
        """Versions of nvImageCodec and of torch."""
        return f"{_library().__version__}, torch {torch.__version__}"

    def __call__(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield the batch of each request, in order.

        All threads share the images of several batches, so that none idles at the end of a batch.
        """
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="largebatch-decode")
        start = partial(self._start, pool, BatchMemory())
        try:
            started = prefetch(map(start, requests), self._prefetch)
            batches = (self._upload.send(d) for s in started for d in self._finish(s, start))
            for sent in prefetch(batches, 1):
                yield self._upload.receive(sent)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # as ``prefetch`` does

    def _start(self, pool: ThreadPoolExecutor, memory: BatchMemory, request: Request) -> _Started:
        images = self._empty(request, memory)
        futures = [
            pool.submit(self._image, request, i, images[i]) for i in range(len(request.contents))
        ]
        return _Started(request, images, futures, _ended(futures))

    def _empty(self, request: Request, memory: BatchMemory) -> Tensor:
        shape = len(request.contents), 3, request.image_size, request.image_size
        if self._on_cpu:
            return memory.empty(shape, self._layout.dtype, self._layout.memory_format)
        return memory.empty(shape, torch.uint8, torch.channels_last)

    def _finish(
        self, started: _Started, start: Callable[[Request], _Started]
    ) -> Iterator[DecodedBatch]:
        """Wait for the images of a batch; yields nothing if none of them can be used."""
        remaining = [started]
        while remaining:
            current = remaining.pop(0)
            # One wake-up for all: each is a switch between threads that decode.
            current.ended.wait()
            try:
                for future in current.futures:
                    future.result()
            except ValueError as error:
                again = self._reader.remake([current.request], _decodes, error)
                remaining = [start(request) for request in again]
            else:
                labels = torch.from_numpy(current.request.labels)
                yield DecodedBatch(Batch(current.images, labels), current.request)

    def time_request(self, request: Request) -> tuple[float, float]:
        """Return the seconds that decoding and transforming a request take on one thread."""
        images = self._empty(request, BatchMemory())
        start = time.perf_counter()
        for i in range(len(request.contents)):
            self._region(request, i)
        middle = time.perf_counter()
        for i in range(len(request.contents)):
            self._image(request, i, images[i])
        decode_seconds = middle - start
        return decode_seconds, max(time.perf_counter() - middle - decode_seconds, 0.0)

    def _image(self, request: Request, i: int, target: Tensor) -> None:
        """Write one image into its place in the batch, ``[3, image_size, image_size]``.

        Raises:
            ValueError: The image cannot be decoded; the message says why.
        """
        crop = request.crop
        width, height = (int(v) for v in crop.resized[i])
        left, top = (int(v) for v in crop.corner[i])
        levels = _resize(self._region(request, i), width, height, self._interpolation)
        levels = _window(levels, left, top, request.image_size)
        if crop.mirrored[i]:
            levels = _mirror(levels)
        if self._on_cpu:
            self._normalisation.into(target, levels)
        else:
            np.copyto(target.permute(1, 2, 0).numpy(), levels)

    def _region(self, request: Request, i: int) -> NDArray[np.uint8]:
        """Decode the region of an image that its crop needs, ``[height, width, 3]``."""
        x, y, width, height = (int(v) for v in request.crop.region[i])
        content = request.contents[i]
        region = self._decoders.region(content, x, y, width, height)
        if region is None:
            region = np.array(decode(content))[y : y + height, x : x + width]
        if region.shape != (height, width, 3):
            name = self._reader.name(int(request.indices[i]))
            raise ValueError(f"{name} has another size than its header states")
        return region


@dataclass(frozen=True, eq=False)
class _Started:
    """A batch being decoded: each of the futures writes one of the images."""

    request: Request
    images: Tensor
    futures: list[Future[None]]
    ended: threading.Event


def _ended(futures: Sequence[Future[None]]) -> threading.Event:
    """Return an event that comes when all have ended, or one has failed or was cancelled.

    ``concurrent.futures.wait`` would wait for ever for those that a pool cancels as it shuts down.
    """
    event, lock, left = threading.Event(), threading.Lock(), len(futures)

    def end(future: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last or future.cancelled() or future.exception():
            event.set()

    for future in futures:
        future.add_done_callback(end)
    return event


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


def _resize(
    levels: NDArray[np.uint8], width: int, height: int, interpolation: str
) -> NDArray[np.uint8]:
    image = torch.from_numpy(levels)[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        image, size=(height, width), mode=interpolation, antialias=True
    )
    return resized[0].permute(1, 2, 0).numpy()


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


def _decodes(content: Encoded) -> bool:
    """Return True: this is only called for images that Pillow can decode."""
    return True
