"""Memory and tensors of the device that tests/streams.py models, given out as torch 2.11 does.

Memory freed on the host goes at once to the next allocation on the stream that it was allocated on,
unless ``record_stream`` named other streams: then only when these have passed the point that they
had reached on the host when the memory was freed. Pinned host memory is given out again when the
copies that torch has started from it are done.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch


class Mark:
    """A point in a stream."""

    passed = False

    def pass_(self) -> None:
        self.passed = True


class Memory:
    """Bytes, with the marks after which they may be given out again."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.empty(-(-size // 512) * 512, dtype=torch.uint8)
        self.marks: list[Mark] = []

    def fits(self, size: int) -> bool:
        return self.bytes.numel() >= size and all(mark.passed for mark in self.marks)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.bytes.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def take(free: list[Memory], size: int) -> Memory:
    """Return the smallest memory that fits, or new memory."""
    fitting = [memory for memory in free if memory.fits(size)]
    if not fitting:
        return Memory(size)
    memory = min(fitting, key=lambda memory: memory.bytes.numel())
    free.remove(memory)
    memory.marks = []
    return memory


class Block:
    """The use of memory by a tensor and its views: freed with the last of them."""

    def __init__(self, memory: Memory, stream: Any) -> None:
        self.others: set[Any] = set()  # streams named by record_stream
        weakref.finalize(self, _free, memory, stream, self.others).atexit = False


def _free(memory: Memory, stream: Any, others: set[Any]) -> None:
    memory.marks = [other.mark() for other in others]
    stream.free.append(memory)


class DeviceTensor(torch.Tensor):
    """A tensor on the model's device."""

    raw: torch.Tensor  # its memory, for use when a stream has reached an operation
    block: Block
    device: Any = None
    is_cuda: Any = True

    @staticmethod
    def of(raw: torch.Tensor, block: Block, device: torch.device) -> DeviceTensor:
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            DeviceTensor,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
        )
        tensor.raw, tensor.block, tensor.device = raw, block, device
        return tensor

    def record_stream(self, stream: Any) -> None:
        if stream is not None:
            self.block.others.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside the model")


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first element to the end of the last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.element_size() * (last + 1) if tensor.numel() else 0
