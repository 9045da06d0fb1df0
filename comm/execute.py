"""Run one all-reduce as a rule specifies: wire dtype, algorithm, and chunks with overlapped phases.

The phases of one chunk run one after another, but different phases use different links: while the
second phase of a chunk crosses between nodes, the first phase of the next chunk runs inside them.
The total time then approaches that of the slowest phase instead of the sum of all phases.
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
    """Sum ``tensor`` over all ranks in place by ``rule``, ignoring its ``max_bytes``.

    Returns when the result is available (gloo), or when it is ordered on the current stream
    (NCCL). All ranks get bitwise identical results. Every rank must make the same calls in the
    same order; the first call creates the process groups that the rule needs.

    With a wire dtype, the tensor is rounded to it, summed in it, and copied back; a rule with
    chunks does this chunk by chunk, and ``chunk_bytes`` counts bytes in the wire dtype. A sum that
    overflows the wire dtype becomes infinite, so divide beforehand where that can happen.

    Args:
        tensor: 1-d, contiguous, floating point, on the device of the back end.

    Raises:
        TopologyError: the algorithm does not support the layout of the ranks.
        RuntimeError: a collective failed; the message is torch's.

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
    assert isinstance(algorithm, Phased)  # checked by Rule
    # A chunk length that is a multiple of the number of ranks needs no padding.
    whole = topology.world_size
    elements = -(-rule.chunk_bytes // dtype.itemsize // whole) * whole
    _pipelined(algorithm, tensor.split(elements), dtype, topology)


def _pipelined(
    algorithm: Phased, chunks: tuple[Tensor, ...], dtype: torch.dtype, topology: Topology
) -> None:
    """Run all ``chunks`` through the phases, each chunk one phase behind the previous one.

    A single thread starts every collective, so all ranks start the collectives of each group in
    the same order. In each round the newest chunk goes first: the next transfer between nodes
    starts before the code waits for the previous one, so the links between nodes are never idle.

    On NCCL the kernels of different groups run concurrently. This is deadlock-free if NCCL follows
    the launch order of the host: ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` (NCCL 2.26 and later).
    """
    lanes = _Lanes(chunks[0].device)
    waiting = deque(chunks)
    running: list[_Chunk] = []  # newest first
    try:
        while waiting or running:
            if waiting:
                phases = _phases_in_dtype(algorithm, waiting.popleft(), dtype, topology)
                running.insert(0, _Chunk(phases))
            for chunk in tuple(running):
                with lanes.lane(chunk.phase):
                    chunk.advance()
                if chunk.pending is None:
                    running.remove(chunk)
    finally:
        lanes.join()


def _phases_in_dtype(
    algorithm: Phased, chunk: Tensor, dtype: torch.dtype, topology: Topology
) -> Iterator[Pending]:
    """Round a chunk to ``dtype``, run its phases, and copy the result back.

    Both conversions happen while the links carry other chunks.
    """
    wire = chunk.to(dtype)
    yield from algorithm.phases(wire, topology)
    if wire is not chunk:
        chunk.copy_(wire)


class _Chunk:
    """A chunk in flight.

    Attributes:
        phase: index of the phase to start next.
        pending: the running phase; None when no phase is left.
    """

    def __init__(self, phases: Iterator[Pending]) -> None:
        self._phases = phases
        self.phase = 0
        self.pending: Pending | None = DONE

    def advance(self) -> None:
        """Wait for the running phase and start the next."""
        assert self.pending is not None
        self.pending.wait()
        self.pending = next(self._phases, None)
        self.phase += 1


class _Lanes:
    """One CUDA stream per phase, so that waiting for one chunk does not delay the others.

    Temporaries of a chunk are allocated on the first stream and used on others. That is safe
    because the first stream is reused only after the last one has finished: both are synchronized
    with the caller's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._caller = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._used: list[torch.cuda.Stream] = []

    def lane(self, phase: int) -> AbstractContextManager[object]:
        """Return the stream context in which to wait for the previous phase and start this one."""
        if self._caller is None:
            return nullcontext()
        if phase == len(self._used):
            self._used.append(_stream(self._caller.device, phase))
            self._used[phase].wait_stream(self._caller)
        return torch.cuda.stream(self._used[phase])

    def join(self) -> None:
        """Make the caller's stream wait for all phase streams."""
        for stream in self._used:
            assert self._caller is not None
            self._caller.wait_stream(stream)


@cache
def _stream(device: torch.device, phase: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
