"""Running statistics of norm layers, put back where a step is skipped.

A forward pass that overflows leaves infinities and NaNs in the running statistics of batch norm.
The skipped step does not mend them, since they are no parameters, and a running average never
forgets a NaN.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from . import skips
from .convert import is_norm
from .gradients import moved


class Statistics:
    """The buffers of a model's norm layers as they were before an iteration.

    It can be registered as a forward pre-hook of the model, which then calls :meth:`remember`. A
    copied or pickled model has its own, which starts empty.
    """

    def __init__(self) -> None:
        # Buffers of one device and dtype with their former values, flat, one after the other.
        self._saved: list[tuple[list[Tensor], Tensor]] | None = None

    def __call__(self, model: nn.Module, args: object) -> None:
        # Not while the model is compiled, where Precision.forward has called remember.
        if not torch.compiler.is_compiling():
            self.remember(model)

    def __deepcopy__(self, memo: object) -> Statistics:
        return Statistics()

    def __reduce__(self) -> tuple[type[Statistics], tuple[()]]:
        return Statistics, ()

    def remember(self, model: nn.Module) -> None:
        """Copy the buffers, once in an iteration, before a forward pass that trains."""
        if self._saved is None and model.training and torch.is_grad_enabled():
            self._saved = _copies(model)

    def forget(self) -> None:
        """Drop the copy."""
        self._saved = None

    @torch.no_grad()
    def end(self, skipped: Tensor | None) -> None:
        """End the iteration: put the buffers back where ``skipped`` (0-d) is true.

        The host does not wait for an accelerator.
        """
        saved, self._saved = self._saved, None
        if saved is None or skipped is None or (skips.is_free_to_read(skipped) and not skipped):
            return
        for buffers, before in saved:
            now = torch.where(moved(skipped, before.device), before, _flat(buffers))
            parts = now.split([buffer.numel() for buffer in buffers])
            shaped = [
                part if buffer.dim() == 1 else part.view_as(buffer)
                for part, buffer in zip(parts, buffers, strict=True)
            ]
            torch._foreach_copy_(buffers, shaped)


@torch.no_grad()
def _copies(model: nn.Module) -> list[tuple[list[Tensor], Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for module in model.modules():
        if module._buffers and is_norm(module):
            for buffer in module._buffers.values():  # buffers() would take ten times as long
                if buffer is not None:
                    groups[buffer.device, buffer.dtype].append(buffer)
    return [(buffers, _flat(buffers)) for buffers in groups.values()]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])
