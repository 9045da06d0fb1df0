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

from .memory import moved
from .sharding import Layout, local
from .state import HALF, States


class Written:
    """What parameters with a master were like after the last step of an optimizer.

    Args:
        optimizer: its name, for the warning.
    """

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._batches: dict[int, tuple[list[Any], ...]] = {}
        self._marks: dict[int, tuple[Any, ...]] = {}  # of all that were in another batch
        self._differs: Tensor | None = None
        self._comparisons, self._warned = 0, False

    def take_over(
        self, number: int, parameters: Sequence[Tensor], layout: Layout, states: States
    ) -> None:
        """Set the masters of a batch to its parameters, in place, where the values differ.

        The first time it warns. Masters of parameters in full precision are dropped.

        Args:
            number: of the batch.
            parameters: of one dtype, those with a gradient.
            layout: theirs.
            states: the state by parameter.
        """
        last = self._batches.pop(number, None)
        if parameters[0].dtype not in HALF:
            for parameter in parameters:
                states[parameter].pop("master", None)
            return
        self._batches[number] = now = _marks(parameters, layout)
        if now == last:
            return
        if last is not None:
            self._marks.update((mark[-1], mark) for mark in zip(*last, strict=True))
        differs = torch.zeros((), dtype=torch.bool, device=local(parameters[:1])[0].device)
        comparisons = self._comparisons
        for parameter, mark in zip(parameters, zip(*now, strict=True), strict=True):
            if self._marks.get(id(parameter)) != mark and "master" in states[parameter]:
                part, master = local([parameter, states[parameter]["master"]])
                same = _rounds_to(master, part)
                differs |= ~same.all()
                master.copy_(torch.where(same, master, part))
                self._comparisons = comparisons + 1
        if not self._warned and self._comparisons > comparisons:
            self._warn_if(differs)

    def note(self, number: int, parameters: Sequence[Tensor], layout: Layout) -> None:
        """Note that a batch has been written by the step itself, which moves no parameter."""
        if number in self._batches:
            self._batches[number][0][:] = _versions(parameters)
            if layout is not None:
                self._batches[number][1][:] = _versions(local(parameters))

    def _warn_if(self, differs: Tensor) -> None:
        if self._differs is not None:
            differs = differs | moved(self._differs, differs.device)
        self._differs = differs
        # On an accelerator the host waits for the value: ever less often, if each step compares.
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
    """Return an optimizer's state dict with masters that are its parameters' now; it may wait.

    Args:
        content: the state dict, which stays as it is, and so do the masters in it.
        groups: the optimizer's groups.
    """
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


def _marks(parameters: Sequence[Tensor], layout: Layout) -> tuple[list[Any], ...]:
    """Return what tells that parameters were written, last their ids: lists, which are fast."""
    shards = parameters if layout is None else local(parameters)  # which have their own counters
    versions = _versions(parameters)
    of_shards = versions if layout is None else _versions(shards)
    dtypes = [shards[0].dtype] * len(shards)
    return versions, of_shards, [s.data_ptr() for s in shards], dtypes, [*map(id, parameters)]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _rounds_to(master: Tensor, parameter: Tensor) -> Tensor:
    """Where a master rounds to the value of a parameter, or both are NaN."""
    rounded = master.to(parameter.device, parameter.dtype)
    return torch.isclose(rounded, parameter, rtol=0, atol=0, equal_nan=True)
