"""FP32 master weights for any torch optimizer, and FP32 weights to export.

An update is often too small to change a half-precision weight at all; added up in FP32 it counts
(Micikevicius et al. 2018, section 3.1). :class:`largebatch.lars.LARS` keeps masters itself
(``master_weights=True``), with fewer passes over memory; this is for SGD and the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_HALF = (torch.float16, torch.bfloat16)


class MasterWeights(Optimizer):
    """An optimizer that updates FP32 masters of half-precision parameters.

    Args:
        optimizer: a torch optimizer over the model's parameters that has not stepped yet. It is
            taken over: step, save and schedule this object in its place.

    Each step gives the optimizer the gradients in FP32, has it update the masters, and rounds
    these into the parameters. Its own state (momentum) is then FP32 too. FP32 parameters are
    updated as they are. Gradients are never altered. Masters are made from the parameters at the
    first step, and are part of the state dict.

    Works with :class:`torch.amp.GradScaler`: a step with an overflow changes nothing. Whether there
    is one is read by the host, as torch does for optimizers that are not fused. (The fused ones
    could tell by themselves, but torch's SGD then starts from a momentum buffer that was never
    written if its first step overflows.)

    Raises:
        ValueError: the optimizer has stepped already.

    Example::

        model = Precision("bf16-master").convert(model)
        optimizer = MasterWeights(SGD(model.parameters(), lr=0.1, momentum=0.9))
    """

    # Tells GradScaler to call step() at once and to leave unscaling and skipping to it.
    _step_supports_amp_scaling = True
    #: For :class:`~largebatch.amp.Precision`, which sees that there are masters where needed.
    master_weights = True

    def __init__(self, optimizer: Optimizer) -> None:
        if optimizer.state:
            raise ValueError(
                f"{type(optimizer).__name__} has stepped already; give it to MasterWeights before"
            )
        self._inner = optimizer
        self._masters: dict[Tensor, Tensor] = {}
        super().__init__([{**group} for group in optimizer.param_groups], optimizer.defaults)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_inner": self._inner, "_masters": self._masters}
        return {**super().__getstate__(), **own}

    def __repr__(self) -> str:
        return f"MasterWeights({self._inner!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as the optimizer's own method does."""
        known = len(self.param_groups)
        super().add_param_group(param_group)
        if known >= len(self._inner.param_groups):  # not while this object is being made
            self._inner.add_param_group({**self.param_groups[-1]})
            self._substitute()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_masters()
        self._pass_options_on()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return loss
        pairs = [
            (parameter, master)
            for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True)
            for parameter, master in zip(group["params"], inner["params"], strict=True)
        ]
        gradients = [parameter.grad for parameter, _ in pairs]
        for (_, master), gradient in zip(pairs, gradients, strict=True):
            master.grad = None
            if gradient is not None:
                # Laid out like the master, which fused kernels take for granted.
                master.grad = torch.empty_like(master).copy_(gradient)
                if scale is not None:
                    master.grad.mul_(scale.to(master.device).reciprocal())
        try:
            self._inner.step()
        finally:
            for (parameter, master), gradient in zip(pairs, gradients, strict=True):
                master.grad = None
                parameter.grad = gradient
        changed = [(p, m) for (p, m), g in zip(pairs, gradients, strict=True) if g is not None]
        halves = [(p, m) for p, m in changed if p is not m]
        if halves:
            torch._foreach_copy_([p for p, _ in halves], [m for _, m in halves])
        for parameter, master in self._masters.items():
            self.state[parameter] = {"master": master}
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state dict, with ``master`` (FP32) in the state of each half-precision
        parameter."""
        self._pass_options_on()
        content = self._inner.state_dict()
        for index, parameter in enumerate(self._parameters()):
            if parameter in self._masters:
                state = content["state"].setdefault(index, {})
                content["state"][index] = {**state, "master": self._masters[parameter]}
        return content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of the optimizer alone: then the masters are the
        parameters.

        Raises:
            ValueError: it is for other parameters.
        """
        self._masters.clear()
        self.state.clear()
        self._make_masters()
        saved = state_dict["state"]
        content = {
            index: {key: value for key, value in state.items() if key != "master"}
            for index, state in saved.items()
        }
        self._inner.load_state_dict({**state_dict, "state": content})
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for index, parameter in zip(ids, self._parameters(), strict=True):
            master = self._masters.get(parameter)
            if master is not None and "master" in saved.get(index, {}):
                master.copy_(saved[index]["master"])
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})
        if self._inner.state:
            for parameter, master in self._masters.items():
                self.state[parameter] = {"master": master}

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _make_masters(self) -> None:
        """Make the masters that are not there yet."""
        for parameter in self._parameters():
            if parameter.dtype in _HALF and parameter not in self._masters:
                self._masters[parameter] = parameter.detach().to(torch.float32)
        self._substitute()

    def _substitute(self) -> None:
        """Have the optimizer work on the masters."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["params"] = [self._masters.get(p, p) for p in group["params"]]

    def _pass_options_on(self) -> None:
        """Have the optimizer take over what schedulers set here."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})


def full_precision_state_dict(
    model: nn.Module, optimizer: Optimizer | None = None
) -> dict[str, Tensor]:
    """The model's state dict in FP32, on the CPU: what to export.

    Args:
        model: of any precision, without DDP around it.
        optimizer: where the masters of its half-precision parameters are, if it has stepped
            (LARS with ``master_weights=True``, or :class:`MasterWeights`).

    Returns:
        Name -> a copy: the master where there is one, else the value itself; floating-point
        values in FP32.
    """
    state = {} if optimizer is None else optimizer.state
    masters = {
        name: state[parameter]["master"]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if "master" in state.get(parameter, {})
    }
    content = {}
    for name, value in model.state_dict().items():
        value = masters.get(name, value).detach()
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        content[name] = value.to("cpu", dtype, copy=True)
    return content
