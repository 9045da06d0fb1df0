"""What goes into a back end and what comes out of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..sources import Encoded
from .crops import Cut

T = TypeVar("T")


class Batch(NamedTuple):
    """A micro-batch on the device.

    Attributes:
        images: normalised, FP32 or FP16, shape ``[n, 3, image_size, image_size]``.
        labels: class numbers, int64, shape ``[n]``.
    """

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class Request:
    """A micro-batch to be made.

    Attributes:
        indices: of the images in their source, shape ``[n]``.
        labels: shape ``[n]``.
        contents: the encoded images, ``n`` of them.
        cut: how each image is cut.
        image_size: pixels on each side of what comes out.
        wanted: the images that were asked for, before others stood in for them or they were left
            out, shape ``[n]`` or more.
        uniforms: the random numbers of the places in the stream, ``[n, UNIFORMS]``; None in
            evaluation.
    """

    indices: NDArray[np.int64]
    labels: NDArray[np.int64]
    contents: list[Encoded]
    cut: Cut
    image_size: int
    wanted: NDArray[np.int64]
    uniforms: NDArray[np.float64] | None

    @property
    def replaced(self) -> int:
        """In training: how many images stand in for others."""
        return int((self.indices != self.wanted).sum()) if self.uniforms is not None else 0


@dataclass(frozen=True)
class Made:
    """A micro-batch and the request that it came from; None for one that needed none."""

    batch: Batch
    request: Request | None


@dataclass(frozen=True)
class Form:
    """What images look like in memory.

    Attributes:
        dtype: FP32 or FP16.
        memory_format: ``torch.contiguous_format`` or ``torch.channels_last``.
    """

    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format


class Upload:
    """Copies batches to a device while it computes: on a stream of its own.

    On the CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # made late: a check of a recipe needs no GPU

    def send(self, made: Made) -> tuple[Made, torch.cuda.Event | None]:
        """Start to copy; from whatever thread."""
        if self._device.type != "cuda":
            return made, None
        # A thread starts on GPU 0: without the device, every rank would take up memory there.
        with torch.cuda.device(self._device):
            self._stream = self._stream or torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                batch = Batch(
                    *(t.pin_memory().to(self._device, non_blocking=True) for t in made.batch)
                )
                return Made(batch, made.request), self._stream.record_event()

    def receive(self, sent: tuple[Made, torch.cuda.Event | None]) -> Made:
        """Let the current stream wait for the copy; from the thread that will use the batch."""
        made, event = sent
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            for tensor in made.batch:
                # or its memory would be free for the next batch before it was used
                tensor.record_stream(stream)
        return made


def ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield ``items``, up to ``depth`` of them made in advance on a thread of their own.

    An iteration that is given up lets the thread finish the item that it is at.
    """
    end = object()
    thread = ThreadPoolExecutor(1, thread_name_prefix="largebatch-input")
    try:
        pending = deque(thread.submit(next, items, end) for _ in range(depth))
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, items, end))
            yield item  # type: ignore[misc]
    finally:
        # Without waiting: the garbage collector may run this in any thread, at any moment, also
        # while that thread holds a lock that the end of another one takes.
        thread.shutdown(wait=False, cancel_futures=True)
