"""FP32 master weights for any torch optimizer, and FP32 weights to export.

A single update is often too small to change a half-precision weight; accumulated in FP32, many of
them do (Micikevicius et al. 2018, section 3.1). :class:`largebatch.lars.LARS` keeps masters itself
(``master_weights=True``), with fewer passes over memory; this class is for other optimizers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .gradients import local, moved, parameters_of, whole
from .loaded import check_loaded
from .skips import is_capturing

_HALF = (torch.float16, torch.bfloat16)


class MasterWeights(Optimizer):
    """An optimizer that updates FP32 masters of half-precision parameters.

    Args:
        optimizer: a torch optimizer over the model's parameters that has not stepped yet. Do not
            use it directly afterwards: step, save and schedule this object instead.

    Each step passes the gradients to the wrapped optimizer in FP32, lets it update the masters, and
    rounds the masters into the parameters. The optimizer's own state (momentum) is then FP32 too.
    FP32 parameters are updated directly. Gradients are never modified. Masters are made from the
    parameters at the first step, and are part of the state dict. Sharded parameters (DTensor, as
    made by FSDP2) have masters that are sharded alike.

    After a step each parameter is its master, rounded. Where it is not when the next step begins,
    because weights were loaded or edited, the master takes the parameter's values over, with a
    warning. (A step does not see edits through ``.data``: call :func:`reset_masters`.)

    Works with :class:`torch.amp.GradScaler`: a step with an overflow changes nothing. The host
    reads the overflow flag, as torch does for optimizers that are not fused. (Fused optimizers
    could check it on the device, but torch's SGD then starts from a momentum buffer that was never
    written if its first step overflows.)

    Raises:
        ValueError: the optimizer has state, which is of the parameters, not of masters.

    Example::

        model = Precision("bf16-master").convert(model)
        optimizer = MasterWeights(SGD(model.parameters(), lr=0.1, momentum=0.9))
    """

    # GradScaler then calls step() directly and leaves unscaling and skipping to it.
    _step_supports_amp_scaling = True
    #: :class:`~largebatch.amp.Precision` checks this where a precision needs masters.
    master_weights = True

    def __init__(self, optimizer: Optimizer) -> None:
        made = {key for state in optimizer.state.values() for key in state}
        if made:
            name = type(optimizer).__name__
            raise ValueError(
                f"{name} already has state ({', '.join(sorted(made))}), of the parameters, not of "
                "masters; valid: an optimizer that makes its state in its first step, wrapped in "
                f"MasterWeights before that; load the state dict of a {name} that has stepped"
            )
        self._inner = optimizer
        self._masters: dict[Tensor, Tensor] = {}
        self._written: dict[Tensor, tuple[Any, ...]] = {}
        self._warned = False
        super().__init__([{**group} for group in optimizer.param_groups], optimizer.defaults)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_inner": self._inner, "_masters": self._masters, "_written": {}, "_warned": False}
        return {**super().__getstate__(), **own}

    def __repr__(self) -> str:
        return f"MasterWeights({self._inner!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group here and to the wrapped optimizer.

        Beside groups with names, parameters without one are called ``group<i>.<j>``.
        """
        known = len(self.param_groups)
        if any("param_names" in group for group in self.param_groups[:1]):
            params = param_group["params"]
            params = [params] if isinstance(params, Tensor) else list(params)
            param_group = {**param_group, "params": params}
            if not any(isinstance(entry, tuple) for entry in params):
                names = [f"group{known}.{j}" for j in range(len(params))]
                param_group.setdefault("param_names", names)
        super().add_param_group(param_group)
        if known >= len(self._inner.param_groups):  # not during __init__, when it has them all
            self._inner.add_param_group({**self.param_groups[-1]})
            self._substitute()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_masters()
        traced = torch.compiler.is_compiling() or any(
            map(is_capturing, {parameter.device for parameter in self._masters})
        )
        if not traced:
            self._take_over()
        self._forward_options()
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
                # In the memory layout of the master, which fused kernels assume.
                master.grad = torch.empty_like(master).copy_(gradient)
                if scale is not None:
                    local(master.grad).mul_(scale.to(master.device).reciprocal())
        try:
            self._inner.step()
        finally:
            for (parameter, master), gradient in zip(pairs, gradients, strict=True):
                master.grad = None
                parameter.grad = gradient
        self._take_over_options()
        changed = [(p, m) for (p, m), g in zip(pairs, gradients, strict=True) if g is not None]
        halves = [(p, m) for p, m in changed if p is not m]
        if halves:
            torch._foreach_copy_([local(p) for p, _ in halves], [local(m) for _, m in halves])
        if not traced:
            self._written = {parameter: _mark(parameter) for parameter in self._masters}
        self._show_masters()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict with the masters added.

        The state of each half-precision parameter has its FP32 master under ``master``, with the
        values of the parameter where these have changed since the last step.
        """

        def packed(_: Optimizer, own: dict[str, Any]) -> dict[str, Any]:
            self._forward_options()
            content = self._inner.state_dict()
            for index, parameter in enumerate(parameters_of(self)):
                if parameter in self._masters:
                    master = current(parameter, self._masters[parameter])
                    state = content["state"].setdefault(index, {})
                    content["state"][index] = {**state, "master": master}
            return content

        handle = self.register_state_dict_post_hook(packed, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of the wrapped optimizer alone.

        Without masters in the state dict, they are made from the parameters. Hooks run as in any
        torch optimizer.

        Raises:
            ValueError: the state is for other parameters, or of another optimizer. Nothing has been
                changed then.
        """

        def load(_: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
            check_loaded(content, self, self._inner)
            self._load(content)
            return {**content, "state": {}}

        def finish(_: Optimizer) -> None:
            self._take_over_options()
            self._show_masters()

        # After the user's pre-hooks and before the user's post-hooks.
        before = self.register_load_state_dict_pre_hook(load)
        after = self.register_load_state_dict_post_hook(finish, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    @torch.no_grad()
    def _load(self, content: dict[str, Any]) -> None:
        """Load a valid state dict into the wrapped optimizer and the masters, in place."""
        self._make_masters()
        states = {
            index: {key: value for key, value in state.items() if key != "master"}
            for index, state in content["state"].items()
        }
        self._inner.load_state_dict({**content, "state": states})
        self._written.clear()
        ids = [i for group in content["param_groups"] for i in group["params"]]
        for index, parameter in zip(ids, parameters_of(self), strict=True):
            if parameter in self._masters:
                value = content["state"].get(index, {}).get("master")
                given = value if isinstance(value, Tensor) else parameter
                local(self._masters[parameter]).copy_(local(given))

    def _take_over(self) -> None:
        """Set masters to parameters that something else has changed since the last step."""
        differs = torch.zeros((), dtype=torch.bool)
        for parameter in self._masters:
            if self._written.get(parameter) != _mark(parameter):
                value, master = local(parameter), local(self._masters[parameter])
                same = _rounds_to(master, value)
                master.copy_(torch.where(same, master, value))
                if parameter.dtype in _HALF and not self._warned:
                    differs = moved(differs, same.device) | ~same.all()
        if differs:
            self._warned = True
            warnings.warn(
                "MasterWeights: weights have been changed since its last step; their FP32 masters "
                "have taken the new values; valid: largebatch.amp.reset_masters(optimizer) after a "
                "change, which does so without this warning",
                stacklevel=5,
            )

    def _make_masters(self) -> None:
        """Make the masters that do not exist yet."""
        for parameter in parameters_of(self):
            if parameter.dtype in _HALF and parameter not in self._masters:
                self._masters[parameter] = parameter.detach().to(torch.float32)
                self._written[parameter] = _mark(parameter)
        self._substitute()

    def _show_masters(self) -> None:
        """Put the masters into the state, where :func:`current_master` and others find them."""
        for parameter, master in self._masters.items():
            self.state[parameter] = {"master": master}

    def _substitute(self) -> None:
        """Replace half-precision parameters by their masters in the wrapped optimizer."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["params"] = [self._masters.get(p, p) for p in group["params"]]

    def _forward_options(self) -> None:
        """Copy the options that schedulers set on this object to the wrapped optimizer."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})

    def _take_over_options(self) -> None:
        """Copy the wrapped optimizer's options here: some count their steps in a group."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})


def reset_masters(optimizer: Optimizer) -> None:
    """Set an optimizer's FP32 masters to the values of its parameters, in place.

    Call it after an edit through ``parameter.data``, and after other weights were loaded in a loop
    whose steps are compiled or replayed by a CUDA graph: the next step would round the old masters
    into the parameters. Eager steps take other changes over themselves, with a warning. Momentum
    and other state stay as they are. Loading the optimizer's own state dict brings its masters with
    it, so that no reset is needed.

    Args:
        optimizer: LARS with ``master_weights=True``, :class:`MasterWeights`, or any other that
            keeps a parameter's master in ``state[parameter]["master"]``. Where there are no masters
            nothing happens.
    """
    with torch.no_grad():
        for parameter in parameters_of(optimizer):
            master = optimizer.state.get(parameter, {}).get("master")
            if master is not None:
                local(master).copy_(local(parameter))


def full_precision_state_dict(
    model: nn.Module, optimizer: Optimizer | None = None
) -> dict[str, Tensor]:
    """Return a copy of the model's state dict in FP32 on the CPU, for export.

    With sharded parameters (FSDP2) each rank returns the whole tensors, and all ranks must call
    this function: it is a collective then.

    Args:
        model: a model of any precision, not wrapped in DDP.
        optimizer: the optimizer that has the masters of the half-precision parameters, once it has
            stepped (LARS with ``master_weights=True``, or :class:`MasterWeights`).

    Returns:
        A copy of each value by name: the master if there is one, else the model's own value; that
        too where the master does not round to it, as the parameter has changed since the last step.
        Floating-point values are in FP32; others keep their dtype.
    """
    masters = {
        name: current_master(optimizer, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    content = {}
    for name, value in model.state_dict().items():
        value = whole(masters.get(name, value).detach())
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        content[name] = value.to("cpu", dtype, copy=True)
    return content


def current_master(optimizer: Optimizer | None, parameter: Tensor) -> Tensor:
    """Return a parameter's master, as :func:`current` does; without one, the parameter."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return current(parameter, state["master"]) if "master" in state else parameter.detach()


@torch.no_grad()
def current(parameter: Tensor, master: Tensor) -> Tensor:
    """Return a master, or a copy that has the parameter's values where it rounds to others."""
    value, own = local(parameter.detach()), local(master)
    same = _rounds_to(own, value)
    if same.all():
        return master
    changed = torch.empty_like(master)
    local(changed).copy_(torch.where(same, own.to(value.device), value))
    return changed


def _rounds_to(master: Tensor, parameter: Tensor) -> Tensor:
    """Return where a master rounds to the value of a parameter, or both are NaN."""
    rounded = master.to(parameter.device, parameter.dtype)
    return torch.isclose(rounded, parameter, rtol=0, atol=0, equal_nan=True)


def _mark(parameter: Tensor) -> tuple[Any, ...]:
    """Return what changes when a parameter is written: version counters, address and dtype."""
    part = local(parameter)  # with a counter of its own
    return parameter._version, part._version, part.data_ptr(), part.dtype
