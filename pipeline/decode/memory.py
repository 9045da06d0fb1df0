"""Memory for batches, reused as soon as nothing refers to the batch before."""

from __future__ import annotations

import math
import weakref
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class BatchMemory:
    """Allocates CPU tensors in memory that earlier tensors have left.

    The C library gives memory of this size back to the system whenever it is freed, and the system
    maps and clears new memory page by page. Tensors may be made and freed on any thread.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def empty(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, form: torch.memory_format
    ) -> Tensor:
        """Return a tensor with any content; its memory is reused when all views of it are gone."""
        size = math.prod(shape) * dtype.itemsize
        memory = self._take(size)
        use = memory[:size]
        # torch holds a reference to the array ``use`` until it frees the tensor's storage.
        weakref.finalize(use, self._free.append, memory).atexit = False
        flat = torch.from_numpy(use).view(dtype)
        if form is torch.channels_last:
            n, channels, height, width = shape
            return flat.view(n, height, width, channels).permute(0, 3, 1, 2)
        return flat.view(shape)

    def _take(self, size: int) -> NDArray[np.uint8]:
        with suppress(IndexError):  # another thread may take the last one
            while (memory := self._free.pop()).nbytes < size:
                pass  # what is too small for this stage is freed
            return memory
        return np.empty(size, np.uint8)
