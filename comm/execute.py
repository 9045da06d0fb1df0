"""Carry out one rule: wire dtype, algorithm, and chunks whose phases overlap.

A chunk's phases follow one another, and different phases use different links: while the second
phase of a chunk crosses between nodes, the first of the next chunk runs inside them. What then
takes longest sets the time, in place of the sum of all phases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from .algorithms import Phased
from .collectives import DONE, Pending
from .plan import WIRE_DTYPES, Rule
from .topology import Topology


def all_reduce(tensor: Tensor, topology: Topology, rule: Rule) -> None:
    """Sum ``tensor`` over all ranks in place as ``rule`` says, whatever its ``max_bytes``.

    Returns when the result is there (gloo), or when it is ordered on the current stream (NCCL).
    All ranks get the same bits. Every rank must make the same calls in the same order; the first
    makes the process groups that the rule needs.

    With a wire dtype, the tensor is rounded to it, summed in it, and copied back, chunk by chunk
    if the rule has chunks, of ``chunk_bytes`` in the wire dtype. A sum that overflows it is
    infinite: divide first where that can happen.

    Args:
        tensor: 1-d, contiguous, floating point, on the device of the back end.

    Raises:
        TopologyError: the algorithm does not go with the layout of the ranks.
        RuntimeError: a collective failed, as torch tells it.

    Example::

        topology = Topology.from_environment()
        all_reduce(gradients, topology, Rule("hierarchical", chunk_bytes=2**20, wire_dtype="bf16"))
    """
    algorithm = rule.implementation
    algorithm.check(topology)
    dtype = tensor.dtype if rule.wire_dtype is None else WIRE_DTYPES[rule.wire_dtype]
    if rule.chunk_bytes is None or tensor.numel() * dtype.itemsize <= rule.chunk_bytes:
        wire = tensor.to(dtype)
        algorithm.all_reduce(wire, topology)
        if wire is not tensor:
            tensor.copy_(wire)
        return
    assert isinstance(algorithm, Phased)  # checked by the rule
    # Chunks that any number of ranks divides need no padding.
    whole = topology.world_size
    elements = -(-rule.chunk_bytes // dtype.itemsize // whole) * whole
    _pipelined(algorithm, tensor.split(elements), dtype, topology)


def _pipelined(
    algorithm: Phased, chunks: tuple[Tensor, ...], dtype: torch.dtype, topology: Topology
) -> None:
    """Take all ``chunks`` through the phases, each chunk one phase behind the one before it.

    One thread starts everything, so that every rank starts the collectives of each group in the
    same order. In a turn the youngest chunk goes first: the next transfer between nodes is started
    before the last is waited for, so that the links between nodes are never idle.

    On NCCL the groups' kernels run at the same time: that is free of deadlock where NCCL follows
    the host's order, with ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` (NCCL 2.26 and later).
    """
    lanes = _Lanes(chunks[0].device)
    waiting = deque(chunks)
    running: list[_Chunk] = []  # youngest first
    try:
        while waiting or running:
            if waiting:
                phases = _rounded(algorithm, waiting.popleft(), dtype, topology)
                running.insert(0, _Chunk(phases))
            for chunk in tuple(running):
                with lanes.lane(chunk.phase):
                    chunk.advance()
                if chunk.pending is None:
                    running.remove(chunk)
    finally:
        lanes.join()


def _rounded(
    algorithm: Phased, chunk: Tensor, dtype: torch.dtype, topology: Topology
) -> Iterator[Pending]:
    """The phases of a chunk, rounded to ``dtype`` before the first and copied back after the last:
    the links carry other chunks meanwhile."""
    wire = chunk.to(dtype)
    yield from algorithm.phases(wire, topology)
    if wire is not chunk:
        chunk.copy_(wire)


class _Chunk:
    """A chunk on its way.

    Attributes:
        phase: the number of the phase to be started next.
        pending: the phase that runs; None if there is none left.
    """

    def __init__(self, phases: Iterator[Pending]) -> None:
        self._phases = phases
        self.phase = 0
        self.pending: Pending | None = DONE

    def advance(self) -> None:
        """Wait for the phase that runs, and start the next."""
        assert self.pending is not None
        self.pending.wait()
        self.pending = next(self._phases, None)
        self.phase += 1


class _Lanes:
    """A CUDA stream for each phase: on one stream, each wait would hold up all other chunks.

    Temporaries of a chunk are made on the first stream and used on others. The first stream's next
    use is behind the last stream's end: both are tied to the stream of the caller.
    """

    def __init__(self, device: torch.device) -> None:
        self._caller = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._used: list[torch.cuda.Stream] = []

    def lane(self, phase: int) -> AbstractContextManager[object]:
        """Where to start a phase, and to wait for the one before it."""
        if self._caller is None:
            return nullcontext()
        if phase == len(self._used):
            self._used.append(_stream(self._caller.device, phase))
            self._used[phase].wait_stream(self._caller)
        return torch.cuda.stream(self._used[phase])

    def join(self) -> None:
        """Have the caller's stream wait for all of them."""
        for stream in self._used:
            assert self._caller is not None
            self._caller.wait_stream(stream)


@cache
def _stream(device: torch.device, phase: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
