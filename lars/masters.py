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
        self._marks: dict[int, Any] = {}
        self._differs: Tensor | None = None
        self._comparisons = 0
        self._warned = False

    def note(self, parameters: Sequence[Tensor], layout: Layout) -> None:
        """Note what parameters of one layout are like now, after a step."""
        self._marks.update(zip(map(id, parameters), _marks(parameters, layout), strict=True))

    def take_over(self, parameters: Sequence[Tensor], layout: Layout, states: States) -> None:
        """Set masters to parameters of one dtype and layout, in place, where the values differ.

        The first time it warns. Masters of parameters in full precision are dropped.
        """
        if parameters[0].dtype not in HALF:
            for parameter in parameters:
                states[parameter].pop("master", None)
            return
        was = map(self._marks.get, map(id, parameters))
        marks = zip(parameters, was, _marks(parameters, layout), strict=True)
        changed = [p for p, old, new in marks if old != new and "master" in states[p]]
        if not changed:
            return
        masters = local([states[parameter]["master"] for parameter in changed])
        differs = torch.zeros((), dtype=torch.bool, device=masters[0].device)
        for part, master in zip(local(changed), masters, strict=True):
            same = _rounds_to(master, part)
            differs |= ~same.all()
            master.copy_(torch.where(same, master, part))
        self._warn_if(differs)

    def _warn_if(self, differs: Tensor) -> None:
        if self._warned:
            return
        if self._differs is not None:
            differs = differs | moved(self._differs, differs.device)
        self._differs, self._comparisons = differs, self._comparisons + 1
        # On an accelerator the host waits for the value: ever less often, if each step compares.
        rarely = self._comparisons & (self._comparisons - 1) == 0
        if (rarely or differs.device.type == "cpu") and differs:
            self._warned = True
            warnings.warn(
                f"{self._optimizer}: weights have been changed since its last step; their FP32 "
                "masters have taken the new values; valid: largebatch.amp.reset_masters(optimizer) "
                "after a change, which does so without this warning",
                stacklevel=5,
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
    for saved, group in zip(content["param_groups"], groups, strict=True):
        for number, parameter in zip(saved["params"], group["params"], strict=True):
            master = states.get(number, {}).get("master")
            if master is None:
                continue
            part, own = local([parameter.detach(), master])
            same = _rounds_to(own, part)
            if not same.all():
                changed = torch.empty_like(master)
                local([changed])[0].copy_(torch.where(same, own, part))
                states[number] = {**states[number], "master": changed}
    return {**content, "state": states}


def _marks(parameters: Sequence[Tensor], layout: Layout) -> list[Any]:
    if layout is None:
        return [(p._version, p.data_ptr(), p.dtype) for p in parameters]
    shards = zip(parameters, local(parameters), strict=True)  # each has a counter of its own
    return [(p._version, s._version, s.data_ptr(), s.dtype) for p, s in shards]


def _rounds_to(master: Tensor, parameter: Tensor) -> Tensor:
    """Where a master rounds to the value of a parameter, or both are NaN."""
    rounded = master.to(parameter.dtype)
    return torch.isclose(rounded, parameter, rtol=0, atol=0, equal_nan=True)
