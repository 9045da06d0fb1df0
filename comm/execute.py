"""Run one all-reduce as a rule specifies: wire dtype, algorithm, and chunks with overlapped phases.

The phases of one chunk run one after another, but different phases use different links: while the
second phase of a chunk crosses between nodes, the first phase of the next chunk runs inside them.
The total time then approaches that of the slowest phase instead of the sum of all phases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from .algorithms import Algorithm, Phased, through_memory
from .collectives import DONE, Pending
from .node_memory import LARGEST_BYTES, NodeMemory
from .plan import WIRE_DTYPES, Rule
from .ranges import ranged
from .topology import Topology


def all_reduce(tensor: Tensor, topology: Topology, rule: Rule) -> None:
    """Sum ``tensor`` over all ranks in place by ``rule``, ignoring its ``max_bytes``.

    Returns when the result is available (gloo), or when it is ordered on the current stream
    (NCCL). All ranks get bitwise identical results. Every rank must make the same calls in the
    same order; the first call creates the process groups that the rule needs.

    Where the ranks of a node share memory, messages of more than 8 MiB go in chunks of that size in
    any case, which bounds the memory.

    With a wire dtype, the tensor is rounded to it, summed in it, and copied back; a rule with
    chunks does this chunk by chunk, and ``chunk_bytes`` counts bytes in the wire dtype. A sum that
    overflows the wire dtype becomes infinite: :func:`~largebatch.comm.average` divides in time.

    Args:
        tensor: 1-d, contiguous, floating point, on the device of the back end.

    Raises:
        TopologyError: the algorithm does not support the layout of the ranks.
        RuntimeError: a collective failed; the message is torch's.

    Example::

        topology = Topology.from_environment()
        all_reduce(gradients, topology, Rule("hierarchical", chunk_bytes=2**20, wire_dtype="bf16"))
    """
    run(tensor, topology, rule, rule.implementation)


def run(tensor: Tensor, topology: Topology, rule: Rule, algorithm: Algorithm) -> None:
    """Do so by the algorithm of the rule, which may give means instead of sums."""
    algorithm.check(topology)
    dtype = tensor.dtype if rule.wire_dtype is None else WIRE_DTYPES[rule.wire_dtype]
    chunks = _chunks(tensor, topology, rule, dtype)
    if len(chunks) > 1 or _node_memory(algorithm, tensor, topology) is not None:
        assert isinstance(algorithm, Phased)  # checked by Rule
        _pipelined(algorithm, chunks, dtype, topology)
        return
    wire = tensor.to(dtype)
    algorithm.all_reduce(wire, topology)
    if wire is not tensor:
        tensor.copy_(wire)


def _chunks(
    tensor: Tensor, topology: Topology, rule: Rule, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    shared = _node_memory(rule.implementation, tensor, topology) is not None
    limit = min(rule.chunk_bytes or LARGEST_BYTES, LARGEST_BYTES) if shared else rule.chunk_bytes
    if limit is None or tensor.numel() * dtype.itemsize <= limit:
        return (tensor,)
    # A chunk length that is a multiple of the number of ranks needs no padding. It is rounded down
    # in shared memory, whose windows are powers of two: one byte more would double a window.
    ranks, length = topology.world_size, limit // dtype.itemsize
    multiple = max(1, length // ranks if shared else -(-length // ranks))
    chunks: tuple[Tensor, ...] = tensor.split(multiple * ranks)
    return chunks


def _node_memory(
    algorithm: Algorithm | Phased, tensor: Tensor, topology: Topology
) -> NodeMemory | None:
    """Return the memory through which an algorithm passes a message within the node, if any."""
    if not isinstance(algorithm, Phased) or tensor.is_cuda or not tensor.numel():
        return None
    if algorithm.shares(tensor.numel(), topology) is None:
        return None
    return topology.groups.memory


def _pipelined(
    algorithm: Phased, chunks: tuple[Tensor, ...], dtype: torch.dtype, topology: Topology
) -> None:
    """Run all ``chunks`` through the phases, each chunk one phase behind the previous one."""
    # A single thread starts every collective, so all ranks start those of each group in the same
    # order. In each round the newest chunk goes first: the next transfer between nodes starts
    # before the code waits for the previous one, so the links between nodes are never idle.
    lanes = _Lanes(chunks[0].device)
    waiting = deque(chunks)
    running: list[_Chunk] = []  # newest first
    try:
        while waiting or running:
            if waiting:
                number = len(chunks) - len(waiting) + 1
                phases = _phases_in_dtype(algorithm, waiting.popleft(), dtype, topology)
                running.insert(0, _Chunk(phases, number))
            for chunk in tuple(running):
                with lanes.lane(chunk):
                    chunk.advance()
                if chunk.pending is None:
                    running.remove(chunk)
                    lanes.end(chunk)
    finally:
        lanes.join()


def _phases_in_dtype(
    algorithm: Phased, chunk: Tensor, dtype: torch.dtype, topology: Topology
) -> Iterator[Pending]:
    """Round a chunk to ``dtype``, run its phases, and copy the result back, beside other chunks."""
    memory = _node_memory(algorithm, chunk, topology)
    if memory is not None:
        shares = algorithm.shares(chunk.numel(), topology)
        assert shares is not None
        across = topology.groups.inter if shares[memory.rank] else None
        yield from through_memory.phases(chunk, dtype, memory, shares, across)
        return
    wire = chunk.to(dtype)
    yield from algorithm.phases(wire, topology)
    if wire is not chunk:
        chunk.copy_(wire)


class _Chunk:
    """A chunk in flight: its running phase, None at the end, and where that left its stream."""

    def __init__(self, phases: Iterator[Pending], number: int = 1) -> None:
        self._phases = phases
        self.number = number
        self.phase = 0
        self.pending: Pending | None = DONE
        self.reached: torch.cuda.Event | None = None

    def advance(self) -> None:
        """Wait for the running phase and start the next."""
        assert self.pending is not None
        if self.phase:
            with ranged(f"chunk {self.number}, wait for phase {self.phase}"):
                self.pending.wait()
        with ranged(f"chunk {self.number}, phase {self.phase + 1}"):
            self.pending = next(self._phases, None)
        self.phase += 1


class _Lanes:
    """One CUDA stream per phase, so that waiting for one chunk does not delay the others."""

    # Each phase of a chunk follows the one before it by an event. Waiting for its collective would
    # not do: in a group of one rank there is none, and the cast of the first phase would then not
    # be waited for.
    #
    # A chunk's memory, such as its copy in the wire dtype, is allocated on one lane and used on
    # others. The host frees it as soon as the last phase is queued, and torch's allocator gives it
    # to the next allocation on the same lane without waiting for other lanes, nor for NCCL
    # (pytorch/pytorch, pull request 194701). Therefore all lanes wait for a chunk that has ended
    # before they start anything for a later one, which is as many chunks behind as there are
    # phases.

    def __init__(self, device: torch.device) -> None:
        self._caller = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._lanes: list[torch.cuda.Stream] = []

    @contextmanager
    def lane(self, chunk: _Chunk) -> Iterator[None]:
        """Wait for a chunk's previous phase and start the next on the stream of that phase."""
        if self._caller is None:
            yield
            return
        if chunk.phase == len(self._lanes):
            self._lanes.append(_stream(self._caller.device, chunk.phase))
            self._lanes[chunk.phase].wait_stream(self._caller)
        lane = self._lanes[chunk.phase]
        if chunk.reached is not None:
            lane.wait_event(chunk.reached)
        with torch.cuda.stream(lane):
            yield
        chunk.reached = lane.record_event()

    def end(self, chunk: _Chunk) -> None:
        """Make all lanes wait for the last phase of a chunk, whose memory is free on the host."""
        for lane in self._lanes:
            assert chunk.reached is not None
            lane.wait_event(chunk.reached)

    def join(self) -> None:
        """Make the caller's stream wait for all lanes."""
        for lane in self._lanes:
            assert self._caller is not None
            self._caller.wait_stream(lane)


@cache
def _stream(device: torch.device, phase: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
