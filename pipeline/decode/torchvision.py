"""Decoding with Pillow and transforming with torchvision, on threads.

This is the fallback where neither DALI nor nvImageCodec is installed, and the reference for the
pixels of their backends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from ..sources import Encoded
from .batch import Batch, DecodedBatch, MemoryLayout, Request, Upload, prefetch
from .crops import Transform
from .pillow import decode
from .reader import Reader


class TorchvisionBackend:
    """Decodes requests to batches with Pillow and torchvision.

    Args:
        reader: Makes requests again if an image cannot be decoded.
        transform: The transform of images.
        layout: Data type and memory format of images.
        device: Device of the batches.
        threads: Number of decoding threads; Pillow releases the GIL while it decodes.
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
        self._transform = transform
        self._layout = layout
        self._upload = Upload(device)
        self._threads = threads
        self._prefetch = prefetch

    @property
    def version(self) -> str:
        """Versions of torchvision and of Pillow."""
        import PIL
        import torchvision

        return f"{torchvision.__version__}, Pillow {PIL.__version__}"

    def __call__(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield the batch of each request, in order."""
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="largebatch-decode")
        try:
            batches = (self._upload.send(decoded) for decoded in self._batches(requests, pool))
            for sent in prefetch(batches, self._prefetch):
                yield self._upload.receive(sent)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # as ``prefetch`` does

    def _batches(
        self, requests: Iterator[Request], pool: ThreadPoolExecutor
    ) -> Iterator[DecodedBatch]:
        for request in requests:
            remaining = [request]
            while remaining:
                try:
                    batch = self._batch(remaining[0], pool)
                except ValueError as error:
                    remaining = self._reader.remake(remaining, _decodes, error)
                else:
                    yield DecodedBatch(batch, remaining.pop(0))

    def _batch(self, request: Request, pool: ThreadPoolExecutor) -> Batch:
        decode_one = partial(self._image, request)
        images = torch.stack(list(pool.map(decode_one, range(len(request.contents)))))
        return Batch(
            images.to(self._layout.dtype, memory_format=self._layout.memory_format),
            torch.from_numpy(request.labels),
        )

    def time_request(self, request: Request) -> tuple[float, float]:
        """Return the seconds that decoding and transforming a request take on one thread."""
        start = time.perf_counter()
        for content in request.contents:
            decode(content)
        middle = time.perf_counter()
        for i in range(len(request.contents)):
            self._image(request, i)
        decode_seconds = middle - start
        return decode_seconds, max(time.perf_counter() - middle - decode_seconds, 0.0)

    def _image(self, request: Request, i: int) -> torch.Tensor:
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as F

        x, y, width, height = (int(v) for v in request.crop.region[i])
        resized_width, resized_height = (int(v) for v in request.crop.resized[i])
        left, top = (int(v) for v in request.crop.corner[i])
        size = request.image_size
        image = decode(request.contents[i])
        image = F.resized_crop(
            *(image, y, x, height, width, [resized_height, resized_width]),
            interpolation=InterpolationMode(self._transform.interpolation),
        )
        image = F.crop(image, top, left, size, size)
        if request.crop.mirrored[i]:
            image = F.horizontal_flip(image)
        tensor = F.to_dtype(F.to_image(image), torch.float32, scale=True)
        normalised: torch.Tensor = F.normalize(
            tensor, list(self._transform.mean), list(self._transform.std)
        )
        return normalised


def _decodes(content: Encoded) -> bool:
    """Return True: this is only called for images that Pillow can decode."""
    return True
