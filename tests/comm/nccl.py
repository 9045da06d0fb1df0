"""A model of NCCL's process groups on the streams of tests/streams.py: all ranks in one process.

No call of ``torch.distributed`` blocks the host on NCCL, so the program of each rank can be run to
its end, one rank after another; the device work of all ranks then runs in the order of a schedule.

A collective runs on a stream of its own for each rank and group, after the work that was on the
current stream at the call, once all ranks of the group have reached it. ``Work.wait`` makes the
current stream wait for it. As in torch 2.11 and later, the work holds its tensors until then, and
no stream is recorded with the allocator (pytorch/pytorch, pull request 194701).
"""

from __future__ import annotations

from collections import defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.comm import Topology, collectives, execute, hook, topology
from largebatch.comm.algorithms import parameter_server
from tests.device_memory import Mark
from tests.streams import Machine, Operation, Stream

NAN = float("nan")


class Group:
    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.streams = {rank: Stream(torch.device("cuda", rank)) for rank in ranks}
        self.calls = dict.fromkeys(ranks, 0)
        self.collectives: list[Collective] = []
        self.mail: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)


class Collective:
    """One call of a group: it runs when the streams of all ranks have reached it."""

    def __init__(self, group: Group, run: Callable[[list[list[Tensor]]], None]) -> None:
        self._group, self._run = group, run
        self._tensors: dict[int, list[Tensor]] = {}
        self._operations: dict[int, Operation] = {}
        self._done = False

    def join(self, rank: int, tensors: list[Tensor]) -> None:
        self._tensors[rank] = tensors
        self._operations[rank] = Operation(self._run_once, self._ready)
        self._group.streams[rank].queue.append(self._operations[rank])

    def _ready(self) -> bool:
        return self._done or all(
            rank in self._operations
            and self._group.streams[rank].queue[0] is self._operations[rank]
            for rank in self._group.ranks
        )

    def _run_once(self) -> None:
        if not self._done:
            self._run([self._tensors[rank] for rank in self._group.ranks])
            self._done = True


class Work:
    def __init__(self, nccl: Nccl, mark: Mark, tensors: Sequence[Tensor]) -> None:
        self._nccl, self._mark, self._tensors = nccl, mark, tensors

    def wait(self) -> None:
        self._nccl.machine.current.wait_mark(self._mark)
        self._tensors = ()


#: Stands for ``dist.P2POp``.
Message = namedtuple("Message", ["kind", "tensor", "peer", "group", "tag", "group_peer"])


class CudaFuture:
    """Stands for ``torch.futures.Future(devices=...)`` as DDP uses it."""

    def __init__(self, *, devices: Any = None) -> None:
        assert devices, "a future without devices does not wait for streams"

    def set_result(self, value: Any) -> None:
        self._value, self._event = value, _active.machine.current.record_event()

    def wait(self) -> Any:
        current = _active.machine.current
        current.wait_event(self._event)
        self._value.record_stream(current)
        return self._value


_active: Nccl


class Nccl:
    """The process groups of a job, and what stands for ``torch.distributed``."""

    def __init__(self, machine: Machine, nodes: tuple[tuple[int, ...], ...]) -> None:
        global _active
        _active = self
        self.machine, self.nodes = machine, nodes
        self.world = [rank for ranks in nodes for rank in ranks]
        self.rank = 0
        self._groups: dict[tuple[int, ...], Group] = {}

    def on_every_rank(self, program: Callable[[Topology], None]) -> None:
        """Run the program of each rank on the host, on a current stream of its own."""
        with self._in_place_of_torch():
            for rank in self.world:
                self.rank = rank
                with self.machine.on_stream(Stream(torch.device("cuda", rank))):
                    program(Topology(self.nodes, rank))

    @contextmanager
    def _in_place_of_torch(self) -> Iterator[None]:
        execute._stream.cache_clear()
        with ExitStack() as patches:
            for target, name, value in (
                (dist, "get_backend", lambda group=None: "nccl"),
                (dist, "is_initialized", lambda: True),
                (dist, "group", SimpleNamespace(WORLD=Group(tuple(self.world)))),
                (dist, "get_rank", self.get_rank),
                (dist, "get_world_size", self.get_world_size),
                (parameter_server, "get_world_size", lambda group: len(group.ranks)),
                (dist, "all_reduce", partial(self._start, all_reduce)),
                (dist, "reduce", partial(self._start, reduce)),
                (dist, "broadcast", partial(self._start, broadcast)),
                (dist, "all_to_all_single", partial(self._start, all_to_all)),
                (dist, "P2POp", Message),
                (dist, "batch_isend_irecv", self.exchange),
                (collectives, "_all_gather", partial(self._start, all_gather)),
                (collectives, "_reduce_scatter", partial(self._start, reduce_scatter)),
                (hook, "Future", CudaFuture),
                (hook, "join_roll_call", lambda: None),
                (hook, "models_of", lambda state: []),
                (topology, "group_of_rank", self._group),
            ):
                patches.enter_context(mock.patch.object(target, name, value))
            yield
        execute._stream.cache_clear()

    def _group(self, parts: Any) -> Any:
        """Return the group of this rank; None stands for this rank alone, as in Topology."""
        ranks = next(tuple(ranks) for ranks in parts if self.rank in ranks)
        if len(ranks) == 1:
            return None
        if ranks not in self._groups:
            self._groups[ranks] = Group(ranks)
        return self._groups[ranks]

    def get_rank(self, group: Group | None = None) -> int:
        return self.rank if group is None else group.ranks.index(self.rank)

    def get_world_size(self, group: Group | None = None) -> int:
        return len(self.world if group is None else group.ranks)

    def _start(
        self, run: Callable[..., None], *tensors: Any, group: Group, async_op: bool, **root: int
    ) -> Work:
        """Queue a collective: ``run`` gets the tensors of each rank, in the order of the group."""
        number = group.calls[self.rank]
        group.calls[self.rank] += 1
        if number == len(group.collectives):
            group.collectives.append(Collective(group, partial(run, *root.values())))
        stream = group.streams[self.rank]
        stream.wait_stream(self.machine.current)
        group.collectives[number].join(self.rank, [tensor.raw for tensor in tensors])
        return Work(self, stream.mark(), tensors)

    def exchange(self, messages: list[Message]) -> list[Work]:
        """Sends leave when the stream reaches them; receives wait for what was sent."""
        group, me = messages[0].group, messages[0].group.ranks.index(self.rank)
        stream = group.streams[self.rank]
        stream.wait_stream(self.machine.current)
        sends = [(m.tensor.raw, m.group_peer) for m in messages if m.kind is dist.isend]
        receives = [(m.tensor.raw, m.group_peer) for m in messages if m.kind is dist.irecv]

        def send() -> None:
            for raw, peer in sends:
                group.mail[me, peer].append(raw.clone())

        def receive() -> None:
            for raw, peer in receives:
                raw.copy_(group.mail[peer, me].popleft())

        self.machine.enqueue(send, stream=stream)
        self.machine.enqueue(
            receive, lambda: all(group.mail[peer, me] for _, peer in receives), stream=stream
        )
        return [Work(self, stream.mark(), [m.tensor for m in messages])]


def total(ranks: list[list[Tensor]]) -> Any:
    return sum(one.double() for *_, one in ranks)


def all_reduce(ranks: list[list[Tensor]]) -> None:
    everything = total(ranks)
    for (one,) in ranks:
        one.copy_(everything)


def reduce(root: int, ranks: list[list[Tensor]]) -> None:
    everything = total(ranks)
    for index, (one,) in enumerate(ranks):
        one.copy_(everything) if index == root else one.fill_(NAN)


def broadcast(root: int, ranks: list[list[Tensor]]) -> None:
    for (one,) in ranks:
        one.copy_(ranks[root][0])


def reduce_scatter(ranks: list[list[Tensor]]) -> None:
    for (own, one), part in zip(ranks, total(ranks).chunk(len(ranks)), strict=True):
        one.fill_(NAN)
        own.copy_(part)


def all_to_all(ranks: list[list[Tensor]]) -> None:
    parts = [one.chunk(len(ranks)) for _, one in ranks]
    for index, (received, _) in enumerate(ranks):
        received.copy_(torch.cat([part[index] for part in parts]))


def all_gather(ranks: list[list[Tensor]]) -> None:
    everything = torch.cat([own for _, own in ranks])
    for one, _ in ranks:
        one.copy_(everything)
