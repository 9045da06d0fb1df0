"""Check state dicts before they are loaded into LARS or Muon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .options import OPTIONS, check_options
from .sharding import layout_of
from .state import CORRECTED

#: The tensors in the state of a parameter.
STATE = ("momentum_buffer", "master")

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
        # torch.distributed.checkpoint stores an empty dict for what a flattened state dict lacks.
        if isinstance(value, dict) and not value:
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
    """Return a group of a state dict of LARS, or raise ValueError where it does not fit."""
    check_has(saved, ("dialect", "trust_coefficient"), index, "LARS")
    options = {**{name: group[name] for name in OPTIONS}, **saved}  # of an older version
    check_options(options)
    if saved["dialect"] != group["dialect"]:
        raise ValueError(
            f"the loaded state is of dialect {saved['dialect']!r}, this optimizer of dialect "
            f"{group['dialect']!r}; their momentum buffers are not interchangeable"
        )
    buffered = any("momentum_buffer" in state for *_, state in loaded)
    if saved["dialect"] == CORRECTED and buffered and "previous_lr" not in saved:
        raise ValueError(
            f"param_groups[{index}] of the loaded state has no 'previous_lr', the learning rate of "
            f"its last step, which dialect {CORRECTED!r} needs; valid: a number"
        )
    return options


def check_has(saved: Mapping[str, Any], options: Sequence[str], index: int, optimizer: str) -> None:
    """Raise ValueError for a loaded group that lacks an option, as of another optimizer."""
    missing = next((name for name in options if name not in saved), None)
    if missing is not None:
        raise ValueError(
            f"param_groups[{index}] of the loaded state has no {missing!r}; valid: state of "
            f"largebatch's {optimizer}"
        )
