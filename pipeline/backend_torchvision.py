"""Decoding with Pillow and transforming with torchvision on threads: the fallback where DALI is
not installed, and the reference for the pixels that the DALI back end makes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from .batch import Batch, Request, ahead, to_device
from .errors import DataError
from .geometry import Transform
from .sources import ImageFolder


class TorchvisionBackend:
    """Turns requests into batches.

    Args:
        source: the images.
        transform: what is done to them.
        device: where batches are wanted.
        threads: that decode; Pillow lets go of Python's lock while it does.
        prefetch: batches made ahead of the one that was asked for.
    """

    def __init__(
        self,
        source: ImageFolder,
        transform: Transform,
        *,
        device: torch.device,
        threads: int,
        prefetch: int,
    ) -> None:
        self._source = source
        self._transform = transform
        self._device = device
        self._threads = threads
        self._prefetch = prefetch

    def __call__(self, requests: Iterator[Request]) -> Iterator[Batch]:
        """Yield the batch of each request, in order."""
        with ThreadPoolExecutor(self._threads, thread_name_prefix="largebatch-decode") as pool:
            yield from ahead(self._batches(requests, pool), self._prefetch)

    def _batches(self, requests: Iterator[Request], pool: ThreadPoolExecutor) -> Iterator[Batch]:
        for request in requests:
            decode = partial(self._image, request)
            images = torch.stack(list(pool.map(decode, range(len(request.indices)))))
            labels = torch.from_numpy(request.labels)
            yield Batch(to_device(images, self._device), to_device(labels, self._device))

    def _image(self, request: Request, i: int) -> torch.Tensor:
        from PIL import Image
        from torchvision.transforms.v2 import functional as F

        x, y, width, height = (int(v) for v in request.cut.region[i])
        resized_width, resized_height = (int(v) for v in request.cut.resized[i])
        left, top = (int(v) for v in request.cut.corner[i])
        size = self._transform.image_size
        path = self._source.path(int(request.indices[i]))
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError) as error:
            raise DataError(f"{path} cannot be decoded: {error}") from error
        image = F.resized_crop(image, y, x, height, width, [resized_height, resized_width])
        image = F.crop(image, top, left, size, size)
        if request.cut.mirrored[i]:
            image = F.horizontal_flip(image)
        tensor = F.to_dtype(F.to_image(image), torch.float32, scale=True)
        normalised: torch.Tensor = F.normalize(
            tensor, list(self._transform.mean), list(self._transform.std)
        )
        return normalised
