"""What a capture into CUDA graphs must leave as it was, and what its replays depend on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Snapshot:
    """The buffers of a model and the states of the random number generators."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._generator = torch.get_rng_state()
        self._of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back."""
        for buffer, value in self._buffers:
            buffer.copy_(value)
        torch.set_rng_state(self._generator)
        if self._of_device is not None:
            torch.cuda.set_rng_state(self._of_device, self._device)


class References:
    """What an optimizer holds: a capture may have put tensors of a graph in the place of others."""

    def __init__(self, optimizer: Optimizer) -> None:
        inner = getattr(optimizer, "_inner", None)  # a wrapped optimizer
        parts = [vars(one) for one in (optimizer, inner) if one is not None]
        for one in parts:  # which grows: of a state, the states of all parameters
            values = [*one.values(), *one.get("param_groups", ())]
            parts += [value for value in values if isinstance(value, dict)]
        self._content = [(part, {**part}) for part in parts]

    def restore(self) -> None:
        """Put it back."""
        for part, content in self._content:
            part.clear()
            part.update(content)


def place_of(value: Any) -> Any:
    """Where a tensor is; of anything else, the value."""
    if isinstance(value, Tensor):
        return value.device, value.data_ptr()
    return value


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group, with the places of those that are tensors.

    A graph holds what an option was at the capture; a learning rate changes inside its tensor.
    """
    return [
        {
            key: place_of(value)
            for key, value in group.items()
            if key not in ("params", "initial_lr")
        }
        for group in optimizer.param_groups
    ]


def state_of(optimizer: Optimizer) -> dict[tuple[Any, ...], Any]:
    """The places of the tensors in the state and options of an optimizer, and the other values.

    Of a tensor on another device than the parameters, such as a count of steps that is kept on the
    CPU, also the value: a replay leaves it as it was.
    """
    content = optimizer.state_dict()  # that of a wrapped optimizer, too
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}

    def seen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device not in devices:
            return *place_of(value), value.tolist()
        return place_of(value)

    states: dict[tuple[Any, ...], Any] = {}
    for index, state in content["state"].items():
        states |= {(index, key): seen(value) for key, value in state.items()}
    for index, group in enumerate(content["param_groups"]):
        options = {key: value for key, value in group.items() if key != "params"}
        states |= {("group", index, key): seen(value) for key, value in options.items()}
    return states
