"""A model of CUDA graphs on the CPU.

A capture records every operator that reaches the device, and leaves everything as it was. A replay
runs them again on the very same tensors. So whatever Python computes during the capture is
constant in a replay, as in a CUDA graph: a learning rate that is a number, a branch, a new tensor.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from largebatch.amp import skips
from largebatch.lars import capture
from largebatch.recipes.training import recorder

#: Operators with which the host waits for a value. CUDA refuses them in a capture.
_READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item")


class Tape(TorchDispatchMode):
    """The operators of a capture, in order, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # of tensors from outside, by storage
        self._made: dict[int, Tensor] = {}  # during the capture, by storage

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in _READS:
            raise RuntimeError(f"{function}: operation not permitted when stream is capturing")
        for tensor in _tensors((args, kwargs)):
            key = _storage(tensor)
            if key not in self._made and key not in self._before:
                whole = _whole(tensor)
                self._before[key] = whole, whole.clone()
        results = function(*args, **(kwargs or {}))
        fresh = []
        for tensor in _tensors(results):
            key = _storage(tensor)
            if key not in self._made and key not in self._before:
                self._made[key] = tensor
                fresh.append(tensor)
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        kept = [t if _storage(t) not in given else None for t in tree_leaves(results)]
        self._calls.append((function, args, kwargs or {}, kept))
        return results

    def rewind(self) -> None:
        """Undo the capture: what was there is as before, and what was made has no content."""
        for whole, value in self._before.values():
            whole.copy_(value)
        self._before.clear()
        for tensor in self._made.values():
            if tensor.is_floating_point():
                _whole(tensor).view(tensor.dtype).fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators again, into the tensors of the capture."""
        for function, args, kwargs, kept in self._calls:
            results = tree_leaves(function(*args, **kwargs))
            for into, value in zip(kept, results, strict=True):
                if isinstance(into, Tensor):
                    assert into.shape == value.shape
                    into.copy_(value)


class RecordedGraphs:
    """Stands in for ``recorder.DeviceGraphs``.

    Attributes:
        captures: Number of captures so far, over all objects.
    """

    captures = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self, run: Callable[[], Any]) -> Any:
        return run()

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        generator = torch.get_rng_state()
        tape = Tape()
        try:
            # LARS then keeps its trust ratios where the graph writes them.
            with (
                mock.patch.object(capture, "captures", return_value=True),
                mock.patch.object(skips, "is_capturing", return_value=True),
                tape,
            ):
                outputs = run()
        finally:
            tape.rewind()
            torch.set_rng_state(generator)
        RecordedGraphs.captures += 1
        return outputs, tape.replay


@contextmanager
def recorded_graphs():
    """Let trainers on the CPU capture their steps, as they would on a GPU."""
    RecordedGraphs.captures = 0
    with (
        mock.patch.dict(recorder.RECORDERS, {"cpu": RecordedGraphs}),
        # On a GPU the host does not look whether a step was skipped.
        mock.patch.object(skips, "is_free_to_read", return_value=False),
    ):
        yield RecordedGraphs


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.numel()]


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
