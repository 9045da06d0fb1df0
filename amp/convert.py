"""Convert a model to half-precision parameters, with its norm layers kept in FP32.

The statistics of a norm layer are sums over many values, and its gain and bias are few and small,
so half precision saves nothing there and costs accuracy (Micikevicius et al. 2018, section 3.3;
apex.amp's O2).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_NORMS = (
    nn.modules.batchnorm._NormBase,  # batch norm and instance norm of any dimension
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


def convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast ``model`` to ``dtype`` in place, except its norm layers, and return it.

    Forward hooks then cast floating-point inputs of the model to ``dtype`` and its outputs to FP32,
    so the training loop needs no casts. Parameters stay the same objects: the optimizer may be made
    before or after, and tied weights stay tied.

    Norm layers are recognised as by :func:`is_norm`. Batch norms accept half-precision inputs with
    FP32 parameters; hooks on other norms cast their inputs to FP32 and their outputs back.

    Args:
        model: the model, not yet wrapped in DDP and not yet compiled.
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Raises:
        ValueError: the model has already been converted.
    """
    if getattr(model, "_largebatch_dtype", None) is not None:
        raise ValueError(f"the model is already converted to {model._largebatch_dtype}")
    for module in model.modules():
        if is_norm(module):
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.register_forward_pre_hook(
                    partial(_inputs_to, torch.float32), with_kwargs=True
                )
                module.register_forward_hook(partial(_outputs_to, dtype))
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    model.register_forward_pre_hook(partial(_inputs_to, dtype), with_kwargs=True)
    model.register_forward_hook(partial(_outputs_to, torch.float32))
    model._largebatch_dtype = dtype  # type: ignore[assignment]
    return model


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm layer, by the same rule as in :mod:`largebatch.lars`.

    Norm layers are torch's own and their subclasses, and modules with "Norm" in the name of their
    class. Excepted are linear layers and convolutions, which normalise their own weight, and
    blocks whose child modules have parameters (``ConvNormAct``, ``NormFreeBlock``).
    """
    return isinstance(module, _NORMS) or (
        "Norm" in type(module).__name__
        and not isinstance(module, _LAYERS)
        and not any(True for child in module.children() for _ in child.parameters())
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in a nested value to ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)({key: _cast(item, dtype) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _inputs_to(
    dtype: torch.dtype, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _outputs_to(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, dtype)
