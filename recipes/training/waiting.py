"""How long a rank waits at the end of its backward pass for the all-reduce of its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .stopwatch import Stopwatch, stopwatch_of

#: The name of the wait among the phases.
ALL_REDUCE_WAIT = "all-reduce wait"


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
        if self._ready is not None:
            self._watch.give_back(self._ready)
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
