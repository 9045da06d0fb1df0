"""Name the layers in which gradients or batch statistics have overflowed; waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .convert import is_norm

_MOST_NAMES = 3


def affected(models: Sequence[nn.Module]) -> str:
    """Say where gradients are not finite, in the order of backward, and in which norm layers."""
    if not models:
        return "no layer can be named without precision.convert(model)"
    gradients = [
        (name, parameter.grad)
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]
    if not gradients:
        return "they have been cleared, so that no layer can be named"
    names = [name for name, gradient in reversed(gradients) if not gradient.isfinite().all()]
    if not names:
        return "those that there are now are finite"
    text = f"affected, from the loss backwards: {_first(names)}"
    statistics = [
        name
        for model in models
        for name, module in model.named_modules()
        if is_norm(module) and not all(b.isfinite().all() for b in module.buffers(recurse=False))
    ]
    if statistics:
        text += f"; the forward pass overflowed, from the input on: {_first(statistics)}"
    return text


def _first(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
