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

from .geometry import Cut

T = TypeVar("T")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it, which takes pinned memory."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Batch(NamedTuple):
    """A micro-batch on the device.

    Attributes:
        images: normalised, FP32, shape ``[n, 3, image_size, image_size]``.
        labels: class numbers, int64, shape ``[n]``.
    """

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Request:
    """A micro-batch to be made.

    Attributes:
        indices: of the images in their source, shape ``[n]``.
        labels: shape ``[n]``.
        cut: how each image is cut.
    """

    indices: NDArray[np.int64]
    labels: NDArray[np.int64]
    cut: Cut


def ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield ``items``, up to ``depth`` of them made in advance on a thread of their own."""
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="largebatch-input") as thread:
        pending = deque(thread.submit(next, items, end) for _ in range(depth))
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, items, end))
            yield item  # type: ignore[misc]
