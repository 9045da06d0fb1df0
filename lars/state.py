"""The state of each parameter: its momentum buffer and its FP32 master."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import capture
from .sharding import Layout, local

#: The dtypes of parameters that may have a master.
HALF = (torch.float16, torch.bfloat16)

#: Running averages in the state of a parameter, of LARS and Muon, and of AdamW.
BUFFERS = ("momentum_buffer", "exp_avg", "exp_avg_sq")

#: The state of an optimizer by parameter.
States = MutableMapping[Tensor, dict[str, Tensor]]


def prepare(
    states: States, parameters: Sequence[Tensor], *, momentum: float, master_weights: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return masters and momentum buffers, if any, of parameters of one dtype, made if need be."""
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
        if "step" in saved:  # torch would use the tensor of the state dict itself
            state["step"] = saved["step"].to(parameter.device, torch.float32, copy=True)
        if "master" in saved and has_master(parameter, master_weights):
            state["master"] = saved["master"].to(parameter.device, torch.float32, copy=True)
        else:
            state.pop("master", None)


def has_master(parameter: Tensor, master_weights: bool) -> bool:
    return master_weights and parameter.dtype in HALF


def buffer_dtype(parameter: Tensor, master_weights: bool) -> torch.dtype:
    return torch.float32 if has_master(parameter, master_weights) else parameter.dtype
