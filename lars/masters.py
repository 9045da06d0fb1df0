"""FP32 masters of parameters that something else may have written since the optimizer did.

After a step a parameter is its master, rounded. Where it is not, since the model was converted,
loaded or edited, the parameter is the truth. The values alone tell: version counters also rise
where equal ones are written back, and not for edits through ``.data``. But a step reads no tensor
whose counter, address and dtype are those after its own last write.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .memory import moved
from .sharding import local
from .state import HALF, States


class Written:
    """Notices which parameters with a master were written since the optimizer's last step."""

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._marks: tuple[list[Any], ...] = ([],)
        self._differs: Tensor | None = None
        self._comparisons, self._warned = 0, False

    def take_over(self, states: States) -> None:
        """Set masters to the parameters where their values differ; the first time, warn."""
        parameters = _with_master(states)
        noted, self._marks = self._marks, _marks(parameters)
        if self._marks == noted:
            return
        known, compared = {*zip(*noted, strict=True)}, False
        differs = torch.zeros((), dtype=torch.bool)
        for parameter, mark in zip(parameters, zip(*self._marks, strict=True), strict=True):
            if parameter.dtype not in HALF:
                del states[parameter]["master"]
            elif mark not in known:
                part, master = local([parameter, states[parameter]["master"]])
                same = _rounds_to(master, part)
                differs = moved(differs, same.device) | ~same.all()
                master.copy_(torch.where(same, master, part))
                compared = True
        if compared and not self._warned:
            self._warn_if(differs)

    def note(self, states: States) -> None:
        """Note version counters and addresses after a step, which may have made masters."""
        parameters = _with_master(states)
        if len(parameters) == len(self._marks[0]):
            self._marks = (*_versions(parameters), *self._marks[2:])
        else:
            self._marks = _marks(parameters)

    def _warn_if(self, differs: Tensor) -> None:
        if self._differs is not None:
            differs = differs | moved(self._differs, differs.device)
        self._differs, self._comparisons = differs, self._comparisons + 1
        # Reading the flag waits for an accelerator: it is read after 1, 2, 4, 8, ... comparisons.
        rarely = self._comparisons & (self._comparisons - 1) == 0
        if (rarely or differs.device.type == "cpu") and differs:
            self._warned = True
            warnings.warn(
                f"{self._optimizer}: weights have been changed since its last step; their FP32 "
                "masters have taken the new values; valid: largebatch.amp.reset_masters(optimizer) "
                "after a change, which does so without this warning",
                stacklevel=6,
            )


@torch.no_grad()
def with_current_masters(
    content: dict[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a state dict whose masters have the values of parameters that changed; it may wait."""
    states = dict(content["state"])
    numbers = (number for saved in content["param_groups"] for number in saved["params"])
    parameters = (parameter for group in groups for parameter in group["params"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if "master" in states.get(number, {}):
            master = states[number]["master"]
            part, own = local([parameter.detach(), master])
            same = _rounds_to(own, part)
            if not same.all():
                changed = torch.empty_like(master)
                local([changed])[0].copy_(torch.where(same, own.to(part.device), part))
                states[number] = {**states[number], "master": changed}
    return {**content, "state": states}


def _with_master(states: States) -> list[Tensor]:
    return [parameter for parameter, state in states.items() if "master" in state]


def _marks(parameters: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """Return version counters, addresses, dtypes and identities, in lists, which are fast."""
    shards = parameters if {*map(type, parameters)} == {Parameter} else local(parameters)
    addresses, dtypes = [s.data_ptr() for s in shards], [s.dtype for s in shards]
    return *_versions(parameters), addresses, dtypes, [*map(id, parameters)]


def _versions(parameters: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the version counters of parameters and of this rank's parts, which have their own."""
    versions = [parameter._version for parameter in parameters]
    if {*map(type, parameters)} == {Parameter}:
        return versions, versions
    return versions, [shard._version for shard in local(parameters)]


def _rounds_to(master: Tensor, parameter: Tensor) -> Tensor:
    """Return where a master rounds to the value of a parameter, or both are NaN."""
    rounded = master.to(parameter.device, parameter.dtype)
    return torch.isclose(rounded, parameter, rtol=0, atol=0, equal_nan=True)
