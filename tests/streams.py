"""A model of CUDA streams and of torch's caching allocators, on which code runs without a GPU.

Work on a stream starts when the stream reaches it: in the order of its own stream and after the
events that it waits for, but otherwise at any time. A race between streams therefore shows only
under some schedules. :class:`Machine` draws them: the host queues the operations of the code under
test, and each runs at a random time that the order of streams and events allows.

Tensors on the model's device are wrappers of CPU tensors that say ``is_cuda``. Views, copies and
arithmetic work on them, reading values on the host does not. Their memory is given out as by
torch's caching allocators (tests/device_memory.py), filled with 0xFF, which is NaN in every
floating-point format.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from random import Random
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.device_memory import Block, DeviceTensor, Mark, Memory, bytes_of, take

_machine: Machine  # the one in use


class Operation:
    """Work in the queue of a stream: it may ``run`` once it is ``ready``; None is at any time."""

    def __init__(self, run: Callable[[], object], ready: Callable[[], bool] | None = None):
        self.run, self.ready = run, ready


class Order(Operation):
    """An operation that only orders others."""


class Stream:
    """Stands for ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = _machine.device if device is None else torch.device(device)
        self.queue: deque[Operation] = deque()
        self.free: list[Memory] = []
        self.weight = 10 ** _machine.random.uniform(-2, 2)
        _machine.streams.append(self)

    def is_ready(self) -> bool:
        """Whether the first operation of the queue may run."""
        return bool(self.queue) and (self.queue[0].ready is None or self.queue[0].ready())

    def mark(self) -> Mark:
        mark = Mark()
        if self.queue:
            self.queue.append(Order(mark.pass_))
        else:
            mark.pass_()
        return mark

    def wait_mark(self, mark: Mark) -> None:
        if not mark.passed:
            self.queue.append(Order(lambda: None, lambda: mark.passed))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.mark = self.mark()
        return event

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:  # otherwise nothing, as in CUDA
            self.wait_mark(event.mark)

    def wait_stream(self, other: Stream) -> None:
        self.wait_mark(other.mark())


class Event:
    """Stands for ``torch.cuda.Event``."""

    mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        (stream or _machine.current).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _machine.current).wait_event(self)


class Machine(TorchDispatchMode):
    """A context in which ``torch.cuda`` and operations on tensors are the model's.

    The seed is of the schedule: how far the host runs ahead, and which stream proceeds next.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = Random(seed)
        self.eagerness = self.random.choice([0.0, 0.2, 0.5, 0.9])
        self.streams: list[Stream] = []
        self.pinned: dict[int, Memory] = {}  # by address
        self.pinned_free: list[Memory] = []
        self.device = torch.device("cuda", 0)
        self.current: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to import the compiler takes seconds

    def __enter__(self) -> Machine:
        global _machine
        _machine = self
        self.current = Stream(self.device)
        self._patches = ExitStack()
        for target, name, value in (
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "Event", Event),
            (torch.cuda, "stream", self.on_stream),
            (torch.cuda, "current_stream", lambda device=None: self.current),
            (torch.cuda, "device", lambda device: nullcontext()),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.Tensor, "pin_memory", lambda tensor: self.pin(tensor)),
        ):
            self._patches.enter_context(mock.patch.object(target, name, value))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    @contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.current, self.device
        if stream is not None:
            self.current, self.device = stream, stream.device
        try:
            yield
        finally:
            self.current, self.device = before

    # --- the schedule ---------------------------------------------------------------------

    def enqueue(
        self,
        run: Callable[[], object],
        ready: Callable[[], bool] | None = None,
        stream: Stream | None = None,
    ) -> None:
        """Add work to a stream, and let some streams proceed."""
        (stream or self.current).queue.append(Operation(run, ready))
        with _disable_current_modes():
            while self.random.random() < self.eagerness and self._step():
                pass

    def _step(self) -> bool:
        ready = [stream for stream in self.streams if stream.is_ready()]
        if not ready:
            return False
        (stream,) = self.random.choices(ready, [stream.weight for stream in ready])
        stream.queue[0].run()
        stream.queue.popleft()
        # What follows and does nothing by itself need not be a step of its own.
        while stream.queue and isinstance(stream.queue[0], Order) and stream.is_ready():
            stream.queue.popleft().run()
        return True

    def synchronize(self) -> None:
        """Let all streams finish."""
        with _disable_current_modes():
            while self._step():
                pass
        assert not any(stream.queue for stream in self.streams), "streams wait for ever"

    # --- memory ---------------------------------------------------------------------------

    def empty(self, like: torch.Tensor) -> DeviceTensor:
        """Allocate a tensor of the shape, strides and dtype of a CPU tensor."""
        memory = take(self.current.free, bytes_of(like))
        self.enqueue(lambda: memory.bytes.fill_(255))
        block = Block(memory, self.current)
        return DeviceTensor.of(memory.like(like), block, self.current.device)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stand for ``tensor.pin_memory()``."""
        memory = take(self.pinned_free, bytes_of(tensor))
        memory.bytes.fill_(255)
        pinned = memory.like(tensor).copy_(tensor)
        self.pinned[memory.bytes.data_ptr()] = memory
        weakref.finalize(pinned, self.pinned_free.append, memory).atexit = False
        return pinned

    # --- operations -----------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [*args, *kwargs.values()]
        devices = [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
        sources = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        if not sources and "cuda" not in devices:
            return func(*args, **kwargs)
        pinned = [memory for memory in map(self._pinned, leaves) if memory is not None]
        raw_args = [self._raw(leaf) for leaf in args]
        raw_kwargs = {name: self._raw(leaf) for name, leaf in kwargs.items()}
        if func.is_view:
            block, device = sources[0].block, sources[0].device
            views = func(*raw_args, **raw_kwargs)
            if isinstance(views, torch.Tensor):
                return DeviceTensor.of(views, block, device)
            return [DeviceTensor.of(view, block, device) for view in views]
        if func._schema.is_mutable:
            result = kwargs.get("out", args[0])
            assert isinstance(result, DeviceTensor), f"the host reads the device: {func}"
            self.enqueue(lambda: func(*raw_args, **raw_kwargs))
        else:
            shaped = func(*raw_args, **raw_kwargs)  # its values are those of another time
            assert isinstance(shaped, torch.Tensor), f"the host reads the device: {func}"
            result = self.empty(shaped)
            raw = result.raw
            if "empty" not in func.name():
                self.enqueue(lambda: raw.copy_(func(*raw_args, **raw_kwargs)))
        for memory in pinned:
            memory.marks.append(self.current.mark())
        return result

    def _raw(self, leaf: Any) -> Any:
        """Return what an operation gets for an argument when it runs."""
        if isinstance(leaf, DeviceTensor):
            return leaf.raw
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if isinstance(leaf, torch.Tensor):
            # Pageable memory is read before the call returns.
            return leaf.clone() if self._pinned(leaf) is None else leaf.detach()
        return leaf

    def _pinned(self, leaf: Any) -> Memory | None:
        on_host = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor)
        return self.pinned.get(leaf.untyped_storage().data_ptr()) if on_host else None
