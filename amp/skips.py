"""The number of skipped steps, kept on the device and read without waiting for it.

The device alone knows whether a step was skipped. Reading its counts in each step would make the
host wait for the step; here a step reads a copy that was started many steps before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: The fewest steps between the start of a copy and its reading. The device is hardly ever so many
#: steps behind the host: it takes about a thousand kernels into its queue.
_LEAST_DELAY = 20


class SkippedSteps:
    """Counts of skipped steps, on the device of the gradients; ``most`` in a row are too many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._delay = self._steps_to_reading = max(most, _LEAST_DELAY)
        # In a row now, in all, the longest run. One tensor that is changed in place, so that each
        # replay of a CUDA graph counts its step.
        self._counts = torch.zeros(3, dtype=torch.int64)
        self._copy: Callable[[], int] | None = None

    @torch.no_grad()
    def count(self, skipped: Tensor) -> int:
        """Count a step; return the longest run of skipped steps if that is too many, else 0."""
        # On an accelerator the run is read once in ``most`` or 20 steps, whichever is more, as it
        # was so many steps before: the same step on all ranks. In between the result is 0.
        in_a_row, in_all, longest = self._on(skipped.device).unbind()
        in_a_row.add_(1).mul_(skipped)
        in_all.add_(skipped)
        torch.maximum(longest, in_a_row, out=longest)
        if is_free_to_read(self._counts):
            return self.too_many()
        if is_capturing(self._counts.device):
            return 0
        self._steps_to_reading -= 1
        if self._steps_to_reading > 0:
            return 0
        before, self._copy = self._copy, _copy_of(longest)
        self._steps_to_reading = self._delay
        return 0 if before is None else self._if_too_many(before())

    def in_a_row(self, device: torch.device) -> Tensor:
        """Return the number of steps skipped up to now in a row, 0-d; it will change in place."""
        return self._on(device)[0]

    def _on(self, device: torch.device) -> Tensor:
        if self._counts.device != device:
            refuse_capture(device)
            self._counts = self._counts.to(device)
        return self._counts

    def too_many(self) -> int:
        """Return the longest run of skipped steps if that is too many, else 0; waits."""
        return self._if_too_many(int(self._counts[2]))

    @property
    def in_all(self) -> int:
        """Number of steps skipped so far. Reading it waits for the device."""
        return int(self._counts[1])

    def state(self) -> list[int]:
        """Return the numbers of steps skipped in a row and in all; waits for the device."""
        return self._counts.tolist()[:2]

    def load(self, in_a_row: int, in_all: int) -> None:
        """Set the counts to what :meth:`state` returned."""
        self._counts.copy_(torch.tensor([in_a_row, in_all, in_a_row]))
        self._copy, self._steps_to_reading = None, self._delay

    def _if_too_many(self, longest: int) -> int:
        if longest < self._most:
            return 0
        self._counts[2].zero_()  # training may go on, and a later run raises again
        self._copy = None
        return longest


def _copy_of(count: Tensor) -> Callable[[], int]:
    """Begin to copy a count (0-d) to the host; return a function that waits for its arrival."""
    on_gpu = count.device.type == "cuda"
    copy = torch.empty(1, dtype=count.dtype, pin_memory=on_gpu)
    copy.copy_(count, non_blocking=True)
    event = torch.cuda.Event() if on_gpu else None
    if event is not None:
        event.record(torch.cuda.current_stream(count.device))

    def arrived() -> int:
        if event is not None:
            event.synchronize()  # done long ago, unless the device is far behind the host
        (found,) = copy.tolist()
        return int(found)

    return arrived


def is_free_to_read(tensor: Tensor) -> bool:
    """Whether the host can read a value without waiting for a device."""
    return tensor.device.type == "cpu"


def is_capturing(device: torch.device) -> bool:
    """Whether work on ``device`` is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError during a capture, where a tensor would be made anew in each replay."""
    if is_capturing(device):
        raise RuntimeError(
            "the loss scale does not exist yet, and a CUDA graph would reset it in each replay; "
            "valid: take a step with this precision before the capture"
        )
