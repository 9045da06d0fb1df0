"""Convert a model to half-precision parameters, with its norm layers kept in FP32.

The statistics of a norm layer are sums over many values, and its gain and bias are few and small,
so half precision saves nothing there and costs accuracy (Micikevicius et al. 2018, section 3.3;
apex.amp's O2).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NORMS = (
    nn.modules.batchnorm._NormBase,  # batch norm and instance norm of any dimension
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
# Norm layers of timm and torchvision that are no subclasses of torch's, by where they are defined.
_OTHER_NORMS = re.compile(
    r"timm\.layers\.(\w*norm\w*|grn|inplace_abn)\.|torchvision\.ops\.misc\.FrozenBatchNorm2d$"
)
_HALF = (torch.float16, torch.bfloat16)
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


def convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast ``model`` to ``dtype`` in place and return it; see :meth:`Precision.convert`."""
    # Batch norms accept half-precision inputs with FP32 parameters; hooks on other norms cast. In
    # modules called norms (NormedLinear) matrices are cast, and the forward pass sees copies of the
    # vectors in ``dtype``.
    parameters = [p for module in model.modules() for p in _to_cast(module)]
    before = getattr(model, "_largebatch_dtype", dtype)
    if before != dtype and before in {p.dtype for p in parameters}:
        raise ValueError(f"the model is already converted to {before}")
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float64:
            raise ValueError(
                f"parameter {name} is in FP64, which {dtype} would cut short; valid: convert "
                "model.float()"
            )
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in parameters:
        if not _fits(parameter, dtype):
            raise ValueError(
                f"parameter {names[parameter]} has values beyond {torch.finfo(dtype).max:g}, which "
                f"{dtype} cannot hold; valid: torch.bfloat16, or smaller values"
            )
    for module in model.modules():
        if is_norm(module):
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                _hook(module, _inputs_as_parameters_remembered, _outputs_as_inputs)
            continue
        own = _to_cast(module)
        buffers = [
            buffer
            for buffer in module.buffers(recurse=False)
            if buffer.dtype != torch.float64 and _fits(buffer, dtype)
        ]
        for tensor in (*own, *buffers):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        if module is not model and any(p.is_floating_point() for p in own):
            _hook(module, _inputs_as_parameters)
        if len(own) < sum(1 for _ in module.parameters(recurse=False)):
            _hook(module, _vectors_as_matrices, _vectors_as_before)
    _hook(model, _inputs_as_model, _outputs_to_fp32)
    model._largebatch_dtype = dtype  # type: ignore[assignment]
    return model


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm layer without a matrix of its own, as in ``lars``."""
    return _is_known_norm(module) or (_is_called_norm(module) and not _to_cast(module))


def _is_known_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or any(
        _OTHER_NORMS.match(f"{base.__module__}.{base.__name__}") for base in type(module).__mro__
    )


def _is_called_norm(module: nn.Module) -> bool:
    return (
        "Norm" in type(module).__name__
        and not isinstance(module, _LAYERS)
        and not any(True for child in module.children() for _ in child.parameters())
    )


def _to_cast(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module's own that do not belong to a norm layer."""
    if _is_known_norm(module):
        return []
    own = module.parameters(recurse=False)
    if _is_called_norm(module):
        return [p for p in own if sum(size > 1 for size in p.shape) > 1]
    return list(own)


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether every finite value of a tensor is finite in ``dtype``."""
    if tensor.is_meta or not tensor.is_floating_point():
        return True
    value = tensor.detach()
    return bool((value.to(dtype).isfinite() | ~value.isfinite()).all())


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in a nested value to ``dtype``; the same value if none."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    items: Any
    if isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, Mapping):
        items = value.items()
    elif is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        items = [(name, getattr(value, name)) for name in names]
    else:
        return value
    changed = {}
    for key, item in items:
        new = _cast(item, dtype)
        if new is not item:
            changed[key] = new
    if not changed:
        return value
    if isinstance(value, tuple):
        parts = [changed.get(place, item) for place, item in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    content = copy.copy(value)  # keeps attributes such as the factory of a defaultdict
    for key, item in changed.items():
        if isinstance(value, (list, Mapping)):
            content[key] = item
        else:
            object.__setattr__(content, key, item)  # a dataclass may be frozen
    return content


def _hook(
    module: nn.Module, before: Callable[..., Any], after: Callable[..., Any] | None = None
) -> None:
    """Register forward hooks, unless the module has them from an earlier conversion."""
    if before in module._forward_pre_hooks.values():
        return
    module.register_forward_pre_hook(before, with_kwargs=True)
    if after is not None:
        module.register_forward_hook(after, always_call=after is _vectors_as_before)


def _dtype_of(parameters: Iterable[Tensor | None]) -> torch.dtype:
    """Return the dtype of the first half-precision parameter, or else of the first of all."""
    first = None
    for parameter in parameters:
        if parameter is None:
            continue
        if parameter.dtype in _HALF:
            return parameter.dtype
        if first is None and parameter.is_floating_point():
            first = parameter.dtype
    return first or torch.float32


def _inputs_as_model(
    module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    dtype = _dtype_of(module.parameters())
    return _cast(args, dtype), _cast(kwargs, dtype)


def _inputs_as_parameters(
    module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    dtype = _dtype_of(module._parameters.values())  # parameters() would take ten times as long
    return _cast(args, dtype), _cast(kwargs, dtype)


def _inputs_as_parameters_remembered(
    module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    inputs = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    module._largebatch_input_dtype = next(
        (value.dtype for value in inputs if value.is_floating_point()), None
    )  # type: ignore[assignment]
    return _inputs_as_parameters(module, args, kwargs)


def _outputs_as_inputs(module: nn.Module, args: Any, output: Any) -> Any:
    dtype = module._largebatch_input_dtype
    return output if dtype is None else _cast(output, dtype)  # type: ignore[arg-type]


def _vectors_as_matrices(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Let a forward pass that mixes vectors and matrices find all of them in one dtype."""
    dtype = _dtype_of(module._parameters.values())
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
            module.__dict__[name] = parameter.to(dtype)  # found before the parameter


def _vectors_as_before(module: nn.Module, args: Any, output: Any) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)


def _outputs_to_fp32(module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, torch.float32)
