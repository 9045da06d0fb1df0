"""Running statistics of modules in training mode, put back where a step is skipped.

A forward pass that overflows leaves infinities and NaNs in the running statistics of batch norm,
and in whatever else modules keep of their inputs. The skipped step does not mend them, since they
are no parameters, and a running average never forgets a NaN.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from . import skips
from .gradients import moved

#: Where a buffer is, and what it was. It refers to no module, so it keeps no model alive.
_Place = tuple[dict[str, Tensor | None], str, Tensor]


class Statistics:
    """The models of a precision, and copies of their buffers from before an iteration."""

    def __init__(self) -> None:
        # Buffers of one device and dtype with their former values, flat; None between iterations.
        self._copies: WeakKeyDictionary[nn.Module, list[tuple[list[_Place], Tensor]] | None] = (
            WeakKeyDictionary()
        )

    @property
    def models(self) -> list[nn.Module]:
        """The models, in the order in which they were converted."""
        return list(self._copies)

    def watch(self, model: nn.Module) -> None:
        """Add a model."""
        self._copies.setdefault(model, None)

    def remember(self) -> None:
        """Copy the buffers of all models, once in an iteration, before a pass that trains."""
        if torch.is_grad_enabled():
            for model, copies in list(self._copies.items()):
                if copies is None:
                    self._copies[model] = _copies_of(model)

    def end(self, skips_of: Callable[[nn.Module], Tensor | None]) -> None:
        """Put buffers back where ``skips_of(model)`` is true (0-d, bool), and end the iteration."""
        # Else where they are not finite, as after a batch that the caller dropped without
        # ``abandon``; where it is None, never.
        for model, copies in list(self._copies.items()):
            skipped = None if copies is None else skips_of(model)
            self._copies[model] = None
            if skipped is not None:
                for places, before in copies or ():
                    _put_back(places, before, skipped)


@torch.no_grad()
def _copies_of(model: nn.Module) -> list[tuple[list[_Place], Tensor]]:
    groups: dict[Any, list[_Place]] = defaultdict(list)
    for module in model.modules():
        own = [(name, b) for name, b in module._buffers.items() if b is not None and b.numel()]
        # With other buffers of the module: what counts batches, and what averages over them.
        if module.training and any(buffer.is_floating_point() for _, buffer in own):
            for name, buffer in own:
                groups[buffer.device, buffer.dtype].append((module._buffers, name, buffer))
    return [(places, _flat([was for *_, was in places])) for places in groups.values()]


@torch.no_grad()
def _put_back(places: list[_Place], before: Tensor, skipped: Tensor) -> None:
    # A module may have replaced its buffer; one of another shape or dtype is left alone.
    now = [_like(buffers.get(name), was) for buffers, name, was in places]
    flat = _flat(now)
    back = ~flat.isfinite() | moved(skipped, before.device)
    if skips.is_free_to_read(back) and not back.any():
        return
    values = torch.where(back, before, flat).split([tensor.numel() for tensor in now])
    # In place, for CUDA graphs. Expanded tensors cannot be written, and so have not changed.
    pairs = [(t, v.view(t.shape)) for t, v in zip(now, values, strict=True) if 0 not in t.stride()]
    torch._foreach_copy_([tensor for tensor, _ in pairs], [value for _, value in pairs])


def _like(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return a tensor, or ``other`` if its shape, dtype or device is not the same."""
    if tensor is None or tensor.shape != other.shape:
        return other
    return tensor if (tensor.dtype, tensor.device) == (other.dtype, other.device) else other


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
