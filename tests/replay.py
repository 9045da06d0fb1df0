"""CUDA graphs without a GPU: operators are recorded once and replayed on the same tensors.

So whatever Python computes during the recording is constant in a replay, as in a CUDA graph: a
learning rate that is a number, a branch, a new tensor.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.host_reads import NoHostReads


class Recording(NoHostReads):
    """Records the operators that run inside; :meth:`replay` runs them again, and no Python.

    It runs them on the very same tensors and leaves results in the tensors that the recording
    returned. A value that the host reads is an error in the recording.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # of tensors from outside, by storage
        self._made: dict[int, Tensor] = {}  # during the capture, by storage

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in _tensors((args, kwargs)):
            key = _storage(tensor)
            if key not in self._made and key not in self._before:
                whole = _whole(tensor)
                self._before[key] = whole, whole.clone()
        results = super().__torch_dispatch__(function, types, args, kwargs)
        for tensor in _tensors(results):
            key = _storage(tensor)
            if key not in self._made and key not in self._before:
                self._made[key] = tensor
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        kept = [t if _storage(t) not in given else None for t in tree_leaves(results)]
        self._calls.append((function, args, kwargs or {}, kept))
        return results

    def rewind(self) -> None:
        """Undo what ran, as a capture only records: new tensors then have no content."""
        for whole, value in self._before.values():
            whole.copy_(value)
        self._before.clear()
        for tensor in self._made.values():
            if tensor.is_floating_point():
                _whole(tensor).view(tensor.dtype).fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators again."""
        for function, args, kwargs, kept in self._calls:
            results = tree_leaves(function(*args, **kwargs))
            for into, value in zip(kept, results, strict=True):
                if isinstance(into, Tensor):
                    assert into.shape == value.shape
                    into.copy_(value)


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.numel()]


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
