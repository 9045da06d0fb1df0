"""Check state dicts before they are loaded into ``MasterWeights``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .gradients import is_sharded

#: Options that tell optimizers apart: each is an option of its optimizers in all their versions.
_TELLING = {"momentum", "betas", "alpha", "rho", "lr_decay", "etas", "trust_coeff"}
_TELLING |= {"amsgrad", "momentum_decay", "dialect", "orthogonal"}  # the last two of LARS and Muon

#: State that torch's optimizers keep in the shape of the parameter.
_LIKE_PARAMETER = {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "sum"}
_LIKE_PARAMETER |= {"square_avg", "grad_avg", "acc_delta", "exp_inf", "prev", "ax"}


def check_loaded(content: Mapping[str, Any], outer: Optimizer, inner: Optimizer) -> None:
    """Raise ValueError if a state dict is not of ``inner`` with the parameters of ``outer``."""
    name = type(inner).__name__
    for key in ("state", "param_groups"):
        if key not in content:
            raise ValueError(f"the loaded state has no {key!r}; valid: a state dict of {name}")
    groups, of_inner = outer.param_groups, inner.param_groups
    sizes, saved = ([len(g["params"]) for g in of] for of in (groups, content["param_groups"]))
    if sizes != saved:
        raise ValueError(
            f"param_groups of the loaded state have {saved} parameters; valid: {sizes}, as here"
        )
    like_parameter = {"master"}
    if type(inner).__module__.startswith("torch.optim."):  # others may keep other shapes
        like_parameter |= _LIKE_PARAMETER
    for i, (group, own, loaded) in enumerate(
        zip(groups, of_inner, content["param_groups"], strict=True)
    ):
        foreign = _TELLING & (loaded.keys() ^ own.keys())
        if foreign:
            which = min(foreign)
            problem = f"has {which!r}" if which in loaded else f"has no {which!r}"
            raise ValueError(
                f"param_groups[{i}] of the loaded state {problem}: it is of another optimizer; "
                f"valid: a state dict of MasterWeights({name}(...)) or {name}"
            )
        for number, parameter in zip(loaded["params"], group["params"], strict=True):
            for key, value in content["state"].get(number, {}).items():
                # SGD stores None before its first step, torch.distributed.checkpoint an empty dict
                # for what a flattened state dict lacks.
                if key in like_parameter and not (value is None or isinstance(value, dict)):
                    _check(number, key, value, parameter)


def _check(number: Any, key: str, value: Any, parameter: Tensor) -> None:
    """Raise ValueError if a value is no floating-point tensor of a parameter's shape."""
    what = f"{key} of parameter {number} in the loaded state"
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise ValueError(f"{what} is a {type(value).__name__}; valid: a floating-point tensor")
    if value.shape != parameter.shape:
        raise ValueError(
            f"{what} has shape {tuple(value.shape)}; valid: {tuple(parameter.shape)}, the "
            "parameter's"
        )
    layout, valid = (
        (t.device_mesh, t.placements) if is_sharded(t) else None  # type: ignore[attr-defined]
        for t in (value, parameter)
    )
    if layout != valid:
        raise ValueError(f"{what} is sharded as {layout}; valid: {valid}, as the parameter")
