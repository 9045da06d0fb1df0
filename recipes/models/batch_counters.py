"""Count the batches of all batch norm layers with one operator per forward pass.

Each batch norm of PyTorch adds 1 to its buffer ``num_batches_tracked`` in a forward pass that
trains: on a GPU a kernel launch per layer, 53 in ResNet-50, for a number that matters only where
``momentum`` is None (``torch.nn.modules.batchnorm._BatchNorm.forward``). Compiled models do the
same. Here the layers only note on the host that they ran, and all buffers are counted together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_NAME = "num_batches_tracked"


class BatchCounters:
    """The counters of a model's batch norm layers, of torch, timm and this package.

    Layers whose ``momentum`` is None count for themselves, as they need the number.

    Args:
        model: The model. Its layers may be replaced, moved and loaded afterwards; counters that
            are new then count for themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm)
            and module.momentum is not None
            and module._buffers.get(_NAME) is not None
        ]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context manager of one or more forward passes: counts at its end.

        Every counter then has the value that it would have without it: 1 more for each time that
        its layer ran in training mode. Outside of it the model is as always; inside, the buffers
        keep their old values. In a CUDA graph, the counting is captured with the forward pass.
        """
        ran: list[Tensor] = []
        hidden = [layer for layer in self._layers if layer._buffers.get(_NAME) is not None]
        for layer in hidden:
            # Found before the buffer, which stays where state_dict() and buffers() look for it.
            layer.__dict__[_NAME] = _Note(layer._buffers[_NAME], ran)
        try:
            yield
        finally:
            for layer in hidden:
                del layer.__dict__[_NAME]
            _add_one(ran)


class _Note:
    """Stands in for a counter while its layer runs."""

    def __init__(self, counter: Tensor | None, ran: list[Tensor]) -> None:
        self._counter, self._ran = counter, ran

    def add_(self, _: int) -> None:
        """Note that the layer ran, as it counts a batch."""
        assert self._counter is not None
        self._ran.append(self._counter)


@torch.no_grad()
def _add_one(ran: list[Tensor]) -> None:
    if not ran:
        return
    once = list({id(counter): counter for counter in ran}.values())
    if len(once) == len(ran):
        torch._foreach_add_(once, 1)
        return
    # A layer that ran several times: a list with a tensor twice would lose an addition.
    ids = [id(counter) for counter in ran]
    torch._foreach_add_(once, [ids.count(id(counter)) for counter in once])
