"""The memory that operators allocate while some code runs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Count the bytes of storages that operators return and that something still refers to.

    What a kernel allocates and frees by itself is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._tensors: Counter[int] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = function(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (
                _address(tensor) in self._tensors or _address(tensor) not in given
            ):
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        address, size = _address(tensor), tensor.untyped_storage().nbytes()
        if not self._tensors[address]:
            self.live += size
            self.peak = max(self.peak, self.live)
        self._tensors[address] += 1
        weakref.finalize(tensor, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self._tensors[address] -= 1
        if not self._tensors[address]:
            del self._tensors[address]
            self.live -= size


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the largest number of bytes that ``run`` holds at once beyond what there was."""
    with torch.no_grad(), Allocations() as allocations:
        run()
    return allocations.peak


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
