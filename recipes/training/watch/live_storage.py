"""Follow the memory that tensor operators allocate, also on tensors without numbers.

On fake tensors (torch's ``FakeTensorMode``), which have a shape, a dtype and a device but no
numbers, a pass of any batch size is counted in a second or two and next to no memory. That is what
the allocator is asked for: not what operators allocate inside of them, such as the workspaces of
cuDNN and oneDNN. torch's own ``MemTracker``, which is private, finds the same bytes in more time,
and fails on models with frozen parameters or with modules that call themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorage(TorchDispatchMode):
    """Context manager that follows the memory of all tensors that operators return in it.

    Args:
        known: Tensors that exist before, which are not counted.

    Attributes:
        bytes: Bytes that are held now.
        peak: The largest that ``bytes`` has been.
        away: Bytes that the user of this object has freed and ``peak_keeping`` shall count on.
        peak_keeping: The largest that ``bytes + away`` has been.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self.bytes = self.peak = self.away = self.peak_keeping = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count the tensors that it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        weakref.finalize(storage, self._forget, key, size)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        self.peak_keeping = max(self.peak_keeping, self.bytes + self.away)

    def _forget(self, key: int, size: int) -> None:
        self._seen.remove(key)
        self.bytes -= size
