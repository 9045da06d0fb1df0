"""Count the bytes of a forward and backward pass without computing it.

The pass runs on fake tensors (torch's ``FakeTensorMode``), which have a shape, a dtype and a device
but no numbers, so any batch size is counted in a second or two and next to no memory. A dispatch
mode sees every tensor that an operator returns, and is told when the memory behind it is freed.
That is what the allocator is asked for: not what operators allocate inside of them, such as the
workspaces of cuDNN and oneDNN.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Casts of parameters by autocast.
_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class Pass:
    """The bytes of forward and backward of one micro-batch, without parameters and optimizer.

    Attributes:
        images: Images and labels.
        activations: What forward leaves for backward, without ``casts``.
        casts: Copies of parameters in half precision, which autocast makes in each forward pass.
        peak: Largest sum at one time, where each gradient is taken away as soon as it is complete,
            with ``images``.
        peak_keeping: The same where gradients are kept.
    """

    images: int
    activations: int
    casts: int
    peak: int
    peak_keeping: int


class LiveStorage(TorchDispatchMode):
    """Context manager that follows the memory of all tensors that operators return in it.

    Args:
        parameters: Tensors that exist before, which are not counted; their casts are told apart.
        known: Other tensors that exist before.

    Attributes:
        bytes: Bytes that are held now.
        peak: The largest that ``bytes`` has been.
        casts: Bytes of the copies of ``parameters`` in another dtype that are held now.
        peak_keeping: The largest that ``bytes`` has been with those of :meth:`taken_away`.
    """

    def __init__(self, parameters: Iterable[Tensor], known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {_key(tensor) for tensor in parameters}
        self._known = self._parameters | {_key(tensor) for tensor in known}
        self._held: dict[int | None, tuple[int, bool]] = {}
        self._away = 0
        self.bytes = self.peak = self.peak_keeping = self.casts = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count the tensors that it returns."""
        result = func(*args, **(kwargs or {}))
        is_cast = func is _CAST and _key(args[0]) in self._parameters
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor, is_cast)
        return result

    def taken_away(self, size_bytes: int) -> None:
        """Note that ``size_bytes`` are about to be freed that ``peak_keeping`` shall count on."""
        self._away += size_bytes

    def _see(self, tensor: Tensor, is_cast: bool) -> None:
        key = _key(tensor)
        if key in self._held or key in self._known:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._held[key] = size, is_cast
        weakref.finalize(storage, self._forget, key)
        self.bytes += size
        self.casts += size * is_cast
        self.peak = max(self.peak, self.bytes)
        self.peak_keeping = max(self.peak_keeping, self.bytes + self._away)

    def _forget(self, key: int | None) -> None:
        size, is_cast = self._held.pop(key)
        self.bytes -= size
        self.casts -= size * is_cast


def count_pass(
    model: nn.Module,
    images: tuple[int, ...],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    *,
    forward: Callable[[], AbstractContextManager[Any]],
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Pass:
    """Count the bytes of a forward and backward pass of a model on one micro-batch.

    Args:
        model: Model on the meta device, converted to its precision. Its parameters and buffers are
            replaced by fake ones.
        images: Shape of the images, ``[n, channels, height, width]``.
        loss_of: Returns the loss, 0-d, of the model's outputs and int64 labels of shape ``[n]``.
        forward: Makes the context of the forward pass and the loss, such as autocast on a CPU.
        dtype: Dtype of the images.
        memory_format: Memory format of the images and of weights with four dimensions.

    Raises:
        Exception: Of any kind, where the model needs numbers that fake tensors do not have.
    """
    model.train().to(memory_format=memory_format)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _make_fake(model)
        batch = torch.empty(images, dtype=dtype).to(memory_format=memory_format)
        labels = torch.zeros(images[0], dtype=torch.int64)
        live = LiveStorage(model.parameters(), [*model.buffers(), batch, labels])

        def take_away(parameter: Tensor) -> None:
            assert parameter.grad is not None
            live.taken_away(parameter.grad.untyped_storage().nbytes())
            parameter.grad = None

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(take_away)
        own = sum(tensor.untyped_storage().nbytes() for tensor in (batch, labels))
        with live:
            with forward():
                loss = loss_of(model(batch), labels)
            casts, left = live.casts, live.bytes
            loss.backward()
    return Pass(own, left - casts, casts, own + live.peak, own + live.peak_keeping)


def _make_fake(model: nn.Module) -> None:
    """Replace parameters and buffers on the meta device by fake ones on the CPU, tied ones once."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            shape, strides = tensor.size(), tensor.stride()
            new = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    for module in model.modules():
        held: tuple[Any, ...] = (module._parameters, module._buffers)
        for tensors in held:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = fake(tensor)


def _key(tensor: Any) -> int | None:
    return tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else None
