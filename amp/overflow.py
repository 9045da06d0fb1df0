"""Name the layers in which gradients or batch statistics have overflowed: waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .convert import is_norm

_MOST_NAMES = 3


def affected(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> str:
    """Say where gradients are not finite now, in the order of backward, and in which norm layers.

    Args:
        models: the models; without any, parameters have the names that the optimizers know.
        optimizers: the optimizers of the parameters.
    """
    if models:
        named = [pair for model in models for pair in model.named_parameters()]
    else:
        named = [
            (names[j] if names else f"group{i}.{j}", parameter)
            for optimizer in optimizers
            for i, group in enumerate(optimizer.param_groups)
            for names in [group.get("param_names")]
            for j, parameter in enumerate(group["params"])
        ]
    if not any(parameter.grad is not None for _, parameter in named):
        return "they have been cleared, so that no layer can be named"
    names = _non_finite(named)[::-1]
    if not names:
        return "those that there are now are finite"
    text = f"affected, from the loss backwards: {_first(names)}"
    forward = [name for model in models for name in _non_finite_statistics(model)]
    if forward:
        text += f"; the forward pass overflowed, from the input on: {_first(forward)}"
    return text


def _non_finite(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the parameters whose gradient is not finite, in the given order."""
    return [
        name
        for name, parameter in named
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]


def _non_finite_statistics(model: nn.Module) -> list[str]:
    """Return the names of the norm layers with buffers that are not finite, from the input on."""
    return [
        name
        for name, module in model.named_modules()
        if module._buffers
        and is_norm(module)
        and not all(bool(buffer.isfinite().all()) for buffer in module.buffers(recurse=False))
    ]


def _first(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
