"""The options of Muon that a parameter group may set: their names, defaults and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..options import check_rate, holds
from .newton_schulz import NS_COEFFICIENTS
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

_FLAGS = ("orthogonal", "nesterov", "norm_projection", "maximize")


def default_ns_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of Newton-Schulz on a tensor, where it is None: as in newton_schulz."""
    if tensor.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if tensor.is_cuda else torch.float32


def check_options(options: Mapping[str, Any]) -> None:
    """Check that each option is in its range.

    Raises:
        ValueError: it is not; the message names the option and the range.
    """
    check_rate(options["lr"], waits=True)
    momentum = options["momentum"]
    betas, eps = options["betas"], options["eps"]
    for name, valid, rule in (
        ("momentum", holds(lambda: 0 <= momentum < 1), "in [0, 1)"),
        (
            "nesterov",
            holds(lambda: not options["nesterov"] or momentum > 0),
            "False unless momentum > 0",
        ),
        ("weight_decay", holds(lambda: options["weight_decay"] >= 0), ">= 0"),
        _one_of("adjust_lr_fn", options, ADJUST_LR_FNS),
        ("trust_coefficient", holds(lambda: options["trust_coefficient"] > 0), "> 0"),
        *((name, options[name] in (False, True), "True or False") for name in _FLAGS),
        _one_of("conv_mode", options, CONV_MODES),
        (
            "ns_coefficients",
            _are_coefficients(options["ns_coefficients"]),
            f"one of {', '.join(NS_COEFFICIENTS)}, or three numbers, or a list of threes",
        ),
        ("ns_steps", _is_count(options["ns_steps"]), "a whole number >= 1"),
        (
            "ns_dtype",
            options["ns_dtype"] in NS_DTYPES,
            "None, torch.float16, torch.bfloat16, torch.float32 or torch.float64",
        ),
        _one_of("rule", options, RULES),
        ("adapt", options["adapt"] in (None, False, True), "True, False or None"),
        ("betas", _are_betas(betas), "two in [0, 1)"),
        ("eps", holds(lambda: eps is None or eps >= 0), ">= 0, or None"),
    ):
        if not valid:
            raise ValueError(f"{name} must be {rule}, not {options[name]!r}")


def _one_of(name: str, options: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, bool, str]:
    return name, options[name] in names, "one of " + ", ".join(names)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_betas(value: Any) -> bool:
    try:
        return len(value) == 2 and all(0 <= beta < 1 for beta in value)
    except TypeError:
        return False


def _are_coefficients(value: Any) -> bool:
    if isinstance(value, str):
        return value in NS_COEFFICIENTS
    try:
        rows = [value] if all(isinstance(x, int | float) for x in value) else list(value)
        return bool(rows) and all(
            len(row) == 3 and all(isinstance(x, int | float) for x in row) for row in rows
        )
    except TypeError:
        return False
