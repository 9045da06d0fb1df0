"""The input and output of a decoding backend, and the copy to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

from ..sources import Encoded
from .crops import Crop

T = TypeVar("T")


class Batch(NamedTuple):
    """A micro-batch on the device.

    Normalised images, FP32 or FP16, ``[n, 3, image_size, image_size]``, and labels, int64, ``[n]``.
    """

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class Request:
    """A micro-batch of n images to be decoded."""

    indices: NDArray[np.int64]  # in the source, [n]
    labels: NDArray[np.int64]  # class numbers, [n]
    contents: list[Encoded]
    crop: Crop
    image_size: int  # pixels on each side of the decoded images
    wanted: NDArray[np.int64]  # indices before unusable images were substituted or left out
    uniforms: NDArray[np.float64] | None  # as Stream.take returns them; None in evaluation

    @property
    def replaced(self) -> int:
        """Number of images that were substituted, in training."""
        return int((self.indices != self.wanted).sum()) if self.uniforms is not None else 0


@dataclass(frozen=True)
class DecodedBatch:
    """A micro-batch and the request that it was decoded from; None for synthetic images."""

    batch: Batch
    request: Request | None


@dataclass(frozen=True)
class MemoryLayout:
    """Data type (FP32 or FP16) and memory format (contiguous or channels last) of images."""

    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format


@dataclass(eq=False)
class Upload:
    """Copies batches to a GPU on a separate stream; there ``finish`` is applied to the images."""

    device: torch.device
    finish: Callable[[Tensor], Tensor] | None = None
    _stream: torch.cuda.Stream | None = None  # made late: checking a recipe needs no GPU

    def send(self, decoded: DecodedBatch) -> tuple[DecodedBatch, torch.cuda.Event | None]:
        """Start the copy; may be called from any thread."""
        if self.device.type != "cuda":
            return decoded, None
        # A new thread is on GPU 0: without this, every rank would allocate memory there.
        with torch.cuda.device(self.device):
            self._stream = self._stream or torch.cuda.Stream()
            # A name for torch.profiler, if that is active: it costs time without it too.
            active = autograd_profiler._is_profiler_enabled
            name = record_function("host to device") if active else nullcontext()
            with torch.cuda.stream(self._stream), name:
                # torch gives the pinned memory out again only when its copy is done.
                images, labels = (
                    t.pin_memory().to(self.device, non_blocking=True) for t in decoded.batch
                )
                batch = Batch(self.finish(images) if self.finish else images, labels)
                return DecodedBatch(batch, decoded.request), self._stream.record_event()

    def receive(self, sent: tuple[DecodedBatch, torch.cuda.Event | None]) -> DecodedBatch:
        """Let the current stream wait for the copy; called from the thread that uses the batch."""
        decoded, event = sent
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            for tensor in decoded.batch:
                # Otherwise the allocator could reuse its memory before the batch has been used.
                tensor.record_stream(stream)
        return decoded


def prefetch(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield items, up to ``depth`` of them made ahead by a thread; closing does not wait for it."""
    end = object()
    thread = ThreadPoolExecutor(1, thread_name_prefix="largebatch-input")
    try:
        pending = deque(thread.submit(next, items, end) for _ in range(depth))
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, items, end))
            yield item  # type: ignore[misc]
    finally:
        # Do not wait: the garbage collector may run this in any thread at any time, even in one
        # that holds a lock which the background thread needs to finish.
        thread.shutdown(wait=False, cancel_futures=True)
