"""Small tensors that the Triton kernels read: addresses, sizes and numbers, cached on the device.

A copy to the device is made in a step only if the content is new. The copy is asynchronous, from
pinned memory: torch's host allocator records an event behind the copy when the pinned tensor is
freed, and does not hand the memory out again before that event is done. So the host neither waits
nor overwrites what is still to be copied.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import capture

#: Number of elements that one program updates.
CHUNK = 16_384

_ALIGNED_BYTES = 16  # the largest load of one GPU thread
_MOST = 64  # entries of a cache: several times the parameter groups and dtypes in use

T = TypeVar("T", bound=tuple[Any, ...])


class Addresses(NamedTuple):
    """The addresses of tensors."""

    table: Tensor  # of weight, gradient, momentum buffer and half, int64 [tensors, 4]
    aligned: bool  # whether all of them can be loaded 16 bytes at a time


class Programs(NamedTuple):
    """The programs of a kernel, which depend on the sizes of tensors alone."""

    sizes: Tensor  # number of elements and first program of each tensor, int64 [tensors, 2]
    programs: Tensor  # tensor and chunk of each program, int32 [programs, 2]


class Numbers(NamedTuple):
    """Numbers of any shape."""

    values: Tensor


class _Entry(NamedTuple):
    value: Any
    stream: Any
    ready: Any


class Cached(Generic[T]):
    """A cached function that makes tensors on a device from some content, for any stream."""

    # In the capture of a CUDA graph, tensors that exist are kept for good, as replays read them.
    # New ones are made in each replay, from pinned memory of the graph (torch 2.11), and are not
    # cached, since they have no content until then.

    def __init__(self, make: Callable[[Any, torch.device], T]) -> None:
        self._make = make
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._of_graphs: dict[int, T] = {}
        self.made = 0  # how often the content was new

    def __call__(self, content: Any, device: torch.device) -> T:
        stream = _current_stream(device)
        capturing = capture.captures(device)
        entry = self._entries.get((content, device))
        if entry is None:
            self.made += 1
            value = self._make(content, device)
            if not capturing:
                ready = None if stream is None else stream.record_event()
                self._entries[content, device] = _Entry(value, stream, ready)
                if len(self._entries) > _MOST:
                    self._entries.popitem(last=False)
            return value
        self._entries.move_to_end((content, device))
        found: T = entry.value
        if capturing:
            self._of_graphs[id(found)] = found
        elif stream != entry.stream:
            stream.wait_event(entry.ready)
            for tensor in found:
                if isinstance(tensor, Tensor):
                    tensor.record_stream(stream)
        return found


def address_table(columns: tuple[tuple[int, ...], ...], device: torch.device) -> Addresses:
    """Copy the addresses of weights, gradients, buffers and halves to a device."""
    numbers, present = len(columns[0]), [column for column in columns if column]
    if not numbers:
        return Addresses(torch.empty(0, 4, dtype=torch.int64, device=device), True)
    # An array takes half of the time of torch.tensor(list).
    flat = array("q", [address for column in present for address in column])
    by_column = torch.frombuffer(flat, dtype=torch.int64).view(len(present), numbers)
    table = torch.empty(numbers, 4, dtype=torch.int64, pin_memory=device.type == "cuda")
    used = [number for number, column in enumerate(columns) if column]
    table[:, used] = by_column.t()
    return Addresses(table.to(device, non_blocking=True), reduce(or_, flat) % _ALIGNED_BYTES == 0)


def program_table(elements: tuple[int, ...], device: torch.device) -> Programs:
    """Divide tensors, by their numbers of elements, into programs on a device."""
    sizes: list[tuple[int, int]] = []
    programs: list[tuple[int, int]] = []
    for tensor, count in enumerate(elements):
        sizes.append((count, len(programs)))
        programs += [(tensor, chunk) for chunk in range(-(-count // CHUNK))]
    return Programs(
        _copied(torch.tensor(sizes, dtype=torch.int64), device),
        _copied(torch.tensor(programs, dtype=torch.int32).view(-1, 2), device),
    )


def _numbers(values: Sequence[float], device: torch.device) -> Numbers:
    return Numbers(_copied(torch.tensor(values, dtype=torch.float64), device))


def _number(value: float, device: torch.device) -> Numbers:
    # Filled by a kernel whose argument is the number: no copy, though each step has a new rate.
    return Numbers(torch.full((), value, dtype=torch.float64, device=device))


def _ones(form: tuple[int, torch.dtype], device: torch.device) -> Numbers:
    return Numbers(torch.ones(form[0], dtype=form[1], device=device))


addresses_on = Cached(address_table)
programs_on = Cached(program_table)
numbers_on = Cached(_numbers)
number_on = Cached(_number)
ones_on = Cached(_ones)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
