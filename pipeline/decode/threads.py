"""Decoding on threads of the CPU, one image at a time, for the backends nvimgcodec and torchvision.

Images stay 8-bit until they are where the model is: a GPU is sent a quarter of the bytes of FP32
and normalises them itself.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .batch import Batch, DecodedBatch, MemoryLayout, Request, Upload, prefetch
from .crops import Transform
from .memory import BatchMemory
from .normalise import Normalisation
from .policy import AutoAugment
from .reader import Reader


class ThreadedBackend(ABC):
    """Decodes requests to batches, of which all threads share the images."""

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
        self._augment: AutoAugment | None = None
        if transform.auto_augment is not None:
            self._augment = AutoAugment(
                transform.auto_augment, transform.mean, transform.interpolation
            )
        self._on_cpu = device.type == "cpu"
        self._upload = Upload(device, self._normalisation.batch)
        self._threads = threads
        self._prefetch = prefetch

    @property
    @abstractmethod
    def version(self) -> str:
        """Versions of the libraries that images are decoded and resized with."""

    # These two raise ValueError for an image that cannot be decoded.

    @abstractmethod
    def _region(self, request: Request, i: int) -> Any:
        """Decode the region of an image that its crop needs."""

    @abstractmethod
    def _levels(self, request: Request, i: int) -> NDArray[np.uint8]:
        """Return the crop of an image, ``[image_size, image_size, 3]``."""

    def __call__(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield the batch of each request, in order; no thread idles at the end of a batch."""
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
        return _Started(request, images, futures)

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
            try:
                # The last first: to wake up for each would be a switch between decoding threads.
                for future in reversed(current.futures):
                    future.result()
            except ValueError as error:
                again = self._reader.remake([current.request], error)
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
        """Write one image into its place in the batch, ``[3, image_size, image_size]``."""
        levels = self._levels(request, i)
        if self._augment is not None and request.uniforms is not None:
            levels = self._augment(levels, request.uniforms[i])
        if self._on_cpu:
            self._normalisation.into(target, levels)
        else:
            np.copyto(target.permute(1, 2, 0).numpy(), levels)


@dataclass(frozen=True, eq=False)
class _Started:
    """A batch being decoded: each of the futures writes one of the images."""

    request: Request
    images: Tensor
    futures: list[Future[None]]
