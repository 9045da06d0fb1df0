"""Check state dicts before they are loaded into LARS, and convert those of other optimizers.

``torch.optim.SGD`` and timm's ``Lars`` keep momentum buffers of the form of dialect ``torch``. Of a
tensor that adapts, such a buffer holds gradients times trust ratios: timm's does, SGD's does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .groups import adapts
from .options import OPTIONS, check_options
from .sharding import layout_of
from .state import CORRECTED

#: The tensors in the state of a parameter.
STATE = ("momentum_buffer", "master")
_SGD = {"lr", "momentum", "dampening", "weight_decay", "nesterov"}
# Options of SGD and timm's Lars that LARS lacks, or has under another name.
_FOREIGN = {"trust_coeff", "always_adapt", "dampening", "foreach", "fused", "differentiable"}


#: Number of a parameter in a state dict, the parameter, and its state.
Loaded = tuple[Any, Tensor, Mapping[str, Tensor]]


def converted(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    convert: Callable[..., dict[str, Any]],
    valid: Sequence[str] = STATE,
) -> dict[str, Any]:
    """Return a copy of a state dict whose groups ``convert`` has put into the optimizer's form."""
    saved_groups = state_dict["param_groups"]
    sizes, saved_sizes = ([len(g["params"]) for g in of] for of in (groups, saved_groups))
    if sizes != saved_sizes:
        return dict(state_dict)  # the base class will raise the error
    states, new_groups = dict(state_dict["state"]), []
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        loaded: list[Loaded] = []
        for number, parameter in zip(saved["params"], group["params"], strict=True):
            if number in states:
                states[number] = _checked(number, parameter, states[number] or {}, valid)
            loaded.append((number, parameter, states.get(number, {})))
        new_groups.append(convert(index, group, saved, loaded))
    return {**state_dict, "state": states, "param_groups": new_groups}


def _checked(
    number: Any, parameter: Tensor, saved: Mapping[str, Any], valid: Sequence[str]
) -> dict[str, Tensor]:
    """Return a parameter's state without placeholders; raise ValueError for what does not fit."""
    state = {}
    for key, value in saved.items():
        # SGD stores None before its first step, torch.distributed.checkpoint an empty dict for
        # what a flattened state dict lacks.
        if value is None or (isinstance(value, dict) and not value):
            continue
        if key not in valid or not isinstance(value, Tensor):
            raise ValueError(
                f"the loaded state of parameter {number} has {key!r}, a {type(value).__name__}; "
                f"valid: the tensors {' and '.join(valid)}"
            )
        state[key] = value
        if key == "step":
            if value.numel() != 1:
                raise ValueError(
                    f"step of parameter {number} has shape {tuple(value.shape)} in the loaded "
                    "state; valid: one number"
                )
            continue
        if value.shape != parameter.shape:
            raise ValueError(
                f"{key} of parameter {number} has shape {tuple(value.shape)} in the loaded state, "
                f"but the parameter has {tuple(parameter.shape)}"
            )
        if layout_of(value) != layout_of(parameter):
            raise ValueError(
                f"{key} of parameter {number} is sharded as {layout_of(value)} in the loaded "
                f"state, the parameter as {layout_of(parameter)}; valid: both alike, as "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict makes them"
            )
    return state


def loaded_group(
    index: int, group: Mapping[str, Any], saved: Mapping[str, Any], loaded: Sequence[Loaded]
) -> dict[str, Any]:
    """Return a group of a state dict of LARS, SGD or timm's Lars in LARS's form."""
    buffered = [(number, p) for number, p, state in loaded if "momentum_buffer" in state]
    source = ""
    if "dialect" in saved:
        options = dict(saved)
        if any(name not in saved for name in OPTIONS):
            # State of SGD in a wrapper such as apex LARC, which has the options of LARS itself.
            options = _without_foreign_options(index, {**_options(group), **saved})
    elif "trust_coeff" in saved:
        source, options = "timm's Lars, ", _from_timm(index, saved)
    elif saved.keys() >= _SGD and "trust_coefficient" not in saved:
        source, options = "torch.optim.SGD, ", _from_sgd(index, group, saved, buffered)
    else:
        raise ValueError(
            f"param_groups[{index}] of the loaded state has no 'dialect'; valid: state of LARS, "
            "torch.optim.SGD or timm's Lars, or with a 'dialect' added to each group if its "
            "momentum buffers are of that dialect"
        )
    check_options(options)
    if source and not buffered:
        options["dialect"] = group["dialect"]  # without buffers, state fits any dialect
    if options["dialect"] != group["dialect"]:
        raise ValueError(
            f"the loaded state is of {source}dialect {options['dialect']!r}, this optimizer of "
            f"dialect {group['dialect']!r}; their momentum buffers are not interchangeable"
        )
    if options["dialect"] == CORRECTED and buffered and "previous_lr" not in options:
        raise ValueError(
            f"param_groups[{index}] of the loaded state has no 'previous_lr', the learning rate of "
            f"its last step, which dialect {CORRECTED!r} needs; valid: a number"
        )
    return options


def _from_timm(index: int, saved: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_without_foreign_options(index, {"maximize": False, **saved}),
        **{"dialect": "torch", "denominator": "sum-of-norms", "decay_at_zero_norm": True},
        "trust_coefficient": saved["trust_coeff"],
        "adapt": bool(saved.get("always_adapt") or saved["weight_decay"] != 0),
    }


def _from_sgd(
    index: int,
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
    buffered: Sequence[tuple[Any, Tensor]],
) -> dict[str, Any]:
    options = {**_options(group), **saved, "dialect": "torch"}
    for number, parameter in buffered:
        if adapts(group, parameter):
            raise ValueError(
                f"momentum_buffer of parameter {number} is of torch.optim.SGD, without the trust "
                "ratios of this parameter, which adapts; valid: adapt=False, state without "
                "momentum buffers, or 'dialect': 'larc' or 'torch' in each group of the loaded "
                "state if a wrapper of SGD (apex LARC, torchlars) multiplied by the ratios"
            )
    return _without_foreign_options(index, options)


def _without_foreign_options(index: int, options: Mapping[str, Any]) -> dict[str, Any]:
    if options.get("dampening") and options["momentum"]:
        raise ValueError(
            f"param_groups[{index}] of the loaded state has dampening {options['dampening']}, "
            "which LARS lacks; valid: 0"
        )
    return {key: value for key, value in options.items() if key not in _FOREIGN}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in OPTIONS}
