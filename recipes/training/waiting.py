"""How long a rank waits at the end of its backward pass for the all-reduce of its gradients."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


class AllReduceWait:
    """Measures the time from a rank's own last gradient to the last reduced one, in each step.

    It is the part of communication that backward does not hide, and the wait for ranks that come
    later. On a GPU it is measured by events on the stream that computes, without waiting for them.

    The last gradient is that of the parameter whose gradient came last in the first backward pass;
    a later step in which that parameter has no gradient is not measured.

    Args:
        model: The model on its device, inside of DDP.
        device: The device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._handles = {
            parameter: parameter.register_post_accumulate_grad_hook(self._gradient)
            for parameter in model.parameters()
            if parameter.requires_grad
        }
        self._last: Tensor | None = None
        self._ready: float | torch.cuda.Event | None = None
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def _gradient(self, parameter: Tensor) -> None:
        self._last = parameter
        self._ready = self._now()

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def backward_returned(self) -> None:
        """Note that the step's last backward pass has returned, with all gradients reduced."""
        now, ready, self._ready = self._now(), self._ready, None
        if len(self._handles) > 1 and self._last is not None:  # the others need no hook any more
            for parameter in [p for p in self._handles if p is not self._last]:
                self._handles.pop(parameter).remove()
        if isinstance(now, float) and isinstance(ready, float):
            self._seconds += now - ready
        elif isinstance(now, torch.cuda.Event) and isinstance(ready, torch.cuda.Event):
            self._events.append((ready, now))

    def read(self) -> float:
        """Return the seconds since the last reading; waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(ready.elapsed_time(now) for ready, now in self._events) / 1000
            self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds
