"""The options of Muon that a parameter group may set, and those of a group that is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..options import FLAG, Range, check_options, one_of
from ..options import RANGES as LARS
from ..state_dicts import Loaded, check_has
from .newton_schulz import NS_COEFFICIENTS, polynomials
from .reference import ADJUST_LR_FNS, CONV_MODES

#: What updates the groups that are not orthogonalised.
RULES = ("sgd", "lars", "adamw")

NS_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Every option that a parameter group may set, with its default; ``lr`` has none.
DEFAULTS: dict[str, Any] = {
    "momentum": 0.95,
    "nesterov": True,
    "weight_decay": 0.0,
    "orthogonal": True,
    "adjust_lr_fn": "original",
    "trust_coefficient": 1e-3,
    "norm_projection": False,
    "conv_mode": "flatten",
    "ns_coefficients": "original",
    "ns_steps": 5,
    "ns_dtype": None,
    "rule": "sgd",
    "adapt": None,
    "betas": (0.9, 0.999),
    "eps": None,
    "maximize": False,
}
OPTIONS = ("lr", *DEFAULTS)


def _are_coefficients(value: Any) -> bool:
    try:
        return bool(polynomials(value, 64))
    except ValueError:
        return False


#: As :data:`largebatch.lars.options.RANGES`.
RANGES: dict[str, Range] = {
    **{name: LARS[name] for name in ("momentum", "weight_decay", "trust_coefficient", "adapt")},
    **dict.fromkeys(("orthogonal", "nesterov", "norm_projection", "maximize"), FLAG),
    "adjust_lr_fn": one_of(ADJUST_LR_FNS),
    "conv_mode": one_of(CONV_MODES),
    "ns_coefficients": (
        _are_coefficients,
        f"one of {', '.join(NS_COEFFICIENTS)}, or three numbers, or a list of threes",
    ),
    "ns_steps": (lambda value: isinstance(value, int) and value >= 1, "a whole number >= 1"),
    "ns_dtype": (
        lambda value: value in NS_DTYPES,
        "None, torch.float16, torch.bfloat16, torch.float32 or torch.float64",
    ),
    "rule": one_of(RULES),
    "betas": (lambda value: len(value) == 2 and all(0 <= b < 1 for b in value), "two in [0, 1)"),
    "eps": (lambda value: value is None or value >= 0, ">= 0, or None"),
}

#: The tensors in the state of a parameter.
STATE = ("momentum_buffer", "exp_avg", "exp_avg_sq", "step", "master")
_ADAMW = ("step", "exp_avg", "exp_avg_sq")


def loaded_group(
    index: int, group: Mapping[str, Any], saved: Mapping[str, Any], loaded: Sequence[Loaded]
) -> dict[str, Any]:
    """Return a group of a state dict of Muon, or raise ValueError where it does not fit."""
    check_has(saved, ("orthogonal", "ns_steps"), index, "Muon")
    saved = {**DEFAULTS, **saved}  # of an older version
    check_options(saved, RANGES)
    for number, _, state in loaded:
        missing = [name for name in _ADAMW if name not in state]
        if 0 < len(missing) < len(_ADAMW):
            raise ValueError(
                f"the loaded state of parameter {number} has no {missing[0]!r}; valid: "
                f"{', '.join(_ADAMW)}, or none of them"
            )
    old, new = _rule(saved), _rule(group)
    if old != new and any(state for *_, state in loaded):
        raise ValueError(
            f"param_groups[{index}] of the loaded state is updated by {old}, that of this "
            f"optimizer by {new}; their state is not interchangeable"
        )
    return {**saved, "orthogonal": group["orthogonal"], "rule": group["rule"]}


def _rule(group: Mapping[str, Any]) -> str:
    return "orthogonal steps" if group["orthogonal"] else group["rule"]
