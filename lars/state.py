"""The state of each parameter, its momentum buffer and its FP32 master, and of a group.

The dialect ``mlperf-corrected`` needs the learning rate of a group's last step. It is a tensor,
because only the device knows whether a step overflowed.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import capture
from .memory import moved
from .sharding import Layout, local

#: The dtypes of parameters that may have a master.
HALF = (torch.float16, torch.bfloat16)

#: Running averages in the state of a parameter, of LARS and Muon, and of AdamW.
BUFFERS = ("momentum_buffer", "exp_avg", "exp_avg_sq")

#: The dialect that needs it, as the key ``previous_lr`` of a group.
CORRECTED = "mlperf-corrected"

#: The state of an optimizer by parameter.
States = MutableMapping[Tensor, dict[str, Tensor]]


def prepare(
    states: States, parameters: Sequence[Tensor], *, momentum: float, master_weights: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the masters and momentum buffers of parameters of one dtype; make missing ones."""
    masters, buffers = [], []
    of_parameters = [states[parameter] for parameter in parameters]
    if has_master(parameters[0], master_weights):
        for parameter, state in zip(parameters, of_parameters, strict=True):
            if "master" not in state:
                capture.refuse(parameter.device, "has no master of some parameters")
                state["master"] = parameter.detach().to(torch.float32)
            masters.append(state["master"])
    if momentum > 0:
        dtype = buffer_dtype(parameters[0], master_weights)
        for parameter, state in zip(parameters, of_parameters, strict=True):
            if "momentum_buffer" not in state:
                capture.refuse(parameter.device, "has no momentum of some parameters")
                state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype)
            buffers.append(state["momentum_buffer"])
    return masters, buffers


def tensors_of(
    states: States,
    parameters: list[Tensor],
    gradients: list[Tensor],
    layout: Layout,
    *,
    momentum: float,
    master_weights: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Return this rank's weights or masters, gradients, buffers, and the halves of its masters."""
    masters, buffers = prepare(states, parameters, momentum=momentum, master_weights=master_weights)
    weights, halves = (masters, parameters) if masters else (parameters, [])
    if layout is None:
        return weights, gradients, buffers, halves
    return local(weights), local(gradients), local(buffers), local(halves)


def plain(value: Any) -> Any:
    """Return NumPy's numbers, also in lists and dicts, as Python's, which torch.load reads."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, Tensor) else value


def restore_dtypes(
    states: States,
    groups: Sequence[Mapping[str, Any]],
    loaded: Mapping[str, Any],
    master_weights: bool,
) -> None:
    """Copy a loaded state dict into the state again, without torch's cast of its dtypes."""
    numbers = (number for group in loaded["param_groups"] for number in group["params"])
    parameters = (parameter for group in groups for parameter in group["params"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if number not in loaded["state"]:
            continue
        saved, state = loaded["state"][number], states[parameter]
        for name in set(BUFFERS).intersection(saved):
            state[name] = saved[name].to(
                parameter.device, buffer_dtype(parameter, master_weights), copy=True
            )
        if "step" in saved:  # torch would keep the state dict's own tensor
            state["step"] = saved["step"].to(parameter.device, torch.float32, copy=True)
        if "master" in saved and has_master(parameter, master_weights):
            state["master"] = saved["master"].to(parameter.device, torch.float32, copy=True)
        else:
            state.pop("master", None)


def has_master(parameter: Tensor, master_weights: bool) -> bool:
    return master_weights and parameter.dtype in HALF


def buffer_dtype(parameter: Tensor, master_weights: bool) -> torch.dtype:
    return torch.float32 if has_master(parameter, master_weights) else parameter.dtype


def add_previous_lr(group: dict[str, Any]) -> None:
    """Add the previous learning rate to a group whose dialect needs it, as a tensor."""
    if group["dialect"] != CORRECTED:
        return
    previous = group.get("previous_lr", 0.0)
    if not isinstance(previous, Tensor):
        device = group["params"][0].device if group["params"] else None
        group["previous_lr"] = torch.tensor(previous, dtype=torch.float64, device=device)


def remember_lr(group: dict[str, Any], found_inf: Tensor | None) -> None:
    """Store the current learning rate as the previous one, unless the step was skipped."""
    previous, lr = group["previous_lr"], group["lr"]
    if found_inf is not None:
        overflowed = moved(found_inf, previous.device) > 0
        if isinstance(lr, Tensor):
            lr = lr.to(previous)
        lr = torch.where(overflowed, previous, lr)
    if isinstance(lr, Tensor):
        previous.copy_(lr)  # in place: a CUDA graph reads it at this address
    else:
        previous.fill_(lr)
