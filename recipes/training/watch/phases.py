"""The phases of a training step: named once, for the metrics of every run and for profiles.

On a CPU they are measured by the clock of the host. On a GPU they are measured by events on the
stream that computes; there the host waits for them only when the meters are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ....comm import is_profiled
from .clocks import Stopwatch, stopwatch_of

INPUT_WAIT = "input wait"
HOST_TO_DEVICE = "host to device"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
METERS = "meters"
#: How long a rank waits at the end of its backward pass for the all-reduce of its gradients.
ALL_REDUCE_WAIT = "all-reduce wait"
#: The update of the moving average of the weights; named, but not measured itself.
AVERAGE = "average of the weights"


class AllReduceWait:
    """Measures the time from a rank's own last gradient to the last reduced one, in each step.

    It is the part of communication that backward does not hide, and the wait for ranks that come
    later. On a GPU it is measured by events on the stream that computes, without waiting for them.

    The last gradient is that of the parameter whose gradient came last in the first backward pass;
    a later step in which that parameter has no gradient is not measured.

    Args:
        model: The model on its device, inside of DDP.
        device: The device.
        stopwatch: Measures; by default that of the device.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, stopwatch: Stopwatch | None = None
    ) -> None:
        self._watch = stopwatch or stopwatch_of(device)
        self._handles = {
            parameter: parameter.register_post_accumulate_grad_hook(self._gradient)
            for parameter in model.parameters()
            if parameter.requires_grad
        }
        self._last: Tensor | None = None
        self._ready: Any = None  # when the last gradient came
        self._read = 0.0  # seconds up to the last reading

    def _gradient(self, parameter: Tensor) -> None:
        self._last = parameter
        self._ready = self._watch.now()

    def backward_returned(self) -> None:
        """Note that the step's last backward pass has returned, with all gradients reduced."""
        ready, self._ready = self._ready, None
        if len(self._handles) > 1 and self._last is not None:  # the others need no hook any more
            for parameter in [p for p in self._handles if p is not self._last]:
                self._handles.pop(parameter).remove()
        if ready is not None:
            self._watch.add(ALL_REDUCE_WAIT, ready, self._watch.now())

    def total(self) -> float:
        """Return the seconds since the start; waits for the device."""
        return self._watch.totals().get(ALL_REDUCE_WAIT, 0.0)

    def read(self) -> float:
        """Return the seconds since the last reading; waits for the device."""
        before, self._read = self._read, self.total()
        return self._read - before


class Phases:
    """Measures the phases of the steps of a run, and names them for torch.profiler.

    Args:
        device: The device that computes.
        waiting: Measures the wait for the all-reduce; None for a single rank.
        stopwatch: Measures; by default that of the device.
        clock: Seconds of the host since any time.

    Attributes:
        input: Context manager around the wait for a micro-batch.
        forward: Around a forward pass and its loss.
        backward: Around a backward pass, with the wait for the all-reduce at its end.
        optimizer: Around the update.
        clearing: Around the release of the gradients, a part of the optimizer; on a GPU it launches
            nothing.
        meters: Around what measures, which is named but not measured itself.
    """

    def __init__(
        self,
        device: torch.device,
        waiting: AllReduceWait | None = None,
        stopwatch: Stopwatch | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.watch = stopwatch or stopwatch_of(device)
        self.on_gpu = device.type == "cuda"
        self.clock = clock
        self._waiting = waiting
        self.measures = False  # whether a step is being taken
        self._steps = 0  # since the last reading
        self._before: dict[str, float] = {}  # seconds up to the last reading
        self.input = _Input(self, INPUT_WAIT)
        self.forward = _Phase(self, FORWARD)
        self.backward = _Phase(self, BACKWARD)
        self.optimizer = _Phase(self, OPTIMIZER)
        self.clearing = _Phase(self, OPTIMIZER, measured=not self.on_gpu)
        self.meters = _Phase(self, METERS, measured=False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager around a step.

        Outside of it nothing is measured: the pass with which DDP lays out its buckets is no part
        of training.
        """
        self.measures = True
        try:
            yield
        finally:
            self.measures = False
            self._steps += 1

    def read(self) -> dict[str, float]:
        """Return the metrics of the steps since the last reading; waits for the device.

        Returns:
            Seconds of this rank: ``input_seconds``, ``forward_seconds``, ``backward_seconds``
            (without the next), ``all_reduce_seconds`` (that backward did not hide, on several
            ranks) and ``optimizer_seconds``; on a GPU also ``copy_seconds``, for which its stream
            waited at the input of a micro-batch beyond the wait of the host. ``input_seconds`` then
            has what the stream waited there with the host. Empty if no step was taken.
        """
        totals = self.watch.totals()
        if self._waiting is not None:
            totals[ALL_REDUCE_WAIT] = self._waiting.total()
        since = {name: total - self._before.get(name, 0.0) for name, total in totals.items()}
        self._before = totals
        steps, self._steps = self._steps, 0
        if not steps:
            return {}
        wait = since.get(ALL_REDUCE_WAIT, 0.0)
        values = {
            "input_seconds": since.get(INPUT_WAIT, 0.0),
            "forward_seconds": since[FORWARD],
            "backward_seconds": max(0.0, since[BACKWARD] - wait),
            "optimizer_seconds": since[OPTIMIZER],
        }
        if self._waiting is not None:
            values["all_reduce_seconds"] = wait
        if self.on_gpu:
            values["copy_seconds"] = since.get(HOST_TO_DEVICE, 0.0)
        return values


class _Phase:
    """A phase as a context manager, for one use at a time."""

    def __init__(self, phases: Phases, name: str, *, measured: bool = True) -> None:
        self._phases, self._name, self._measured = phases, name, measured
        self._start: Any = None
        self._range: Any = None

    def __enter__(self) -> None:
        if is_profiled():
            self._range = record_function(self._name)
            self._range.__enter__()
        if self._measured and self._phases.measures:
            self._start = self._phases.watch.now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            self._add(start)
        if self._range is not None:
            opened, self._range = self._range, None
            opened.__exit__(kind, error, trace)

    def _add(self, start: Any) -> None:
        watch = self._phases.watch
        watch.add(self._name, start, watch.now())


class _Input(_Phase):
    """The wait for a micro-batch, which on a GPU is measured on the host as well.

    Its stream waits for the host, and then for the copy. A host that waits while the stream still
    computes holds nothing up, so what counts is the lesser of the two waits.
    """

    _since = 0.0

    def __enter__(self) -> None:
        super().__enter__()
        self._since = self._phases.clock()

    def _add(self, start: Any) -> None:
        if not self._phases.on_gpu:
            return super()._add(start)
        watch, waited = self._phases.watch, self._phases.clock() - self._since
        watch.add(self._name, start, watch.now(), at_most=waited, beyond=HOST_TO_DEVICE)
