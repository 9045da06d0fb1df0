"""The options of LARS that a parameter group may set: their names, ranges and later additions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from .reference import DENOMINATORS, DIALECTS
from .sharding import is_flattened_by_fsdp1

#: Every option that a parameter group may set.
OPTIONS = (
    "lr",
    "momentum",
    "weight_decay",
    "trust_coefficient",
    "eps",
    "dialect",
    "nesterov",
    "trust_clip",
    "denominator",
    "decay_at_zero_norm",
    "maximize",
    "adapt",
)

#: Options that the first version lacked, each with the value that says what that version did.
#: A checkpoint that lacks one of them was written before it existed.
ADDED_LATER = {"denominator": "sum-of-norms", "decay_at_zero_norm": True, "maximize": False}

# Keys of a group that do not concern the optimizer: what torch and LARS keep there, and what
# schedulers and recipes of layer-wise learning rates add for themselves.
_NOT_OPTIONS = frozenset(
    (
        *("params", "param_names", "previous_lr"),
        *("initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "base_momentum", "max_momentum"),
        *("lr_scale", "lr_mult", "lr_multiplier", "wd_multiplier", "is_last_layer", "name"),
    )
)


def check_options(options: Mapping[str, Any]) -> None:
    """Check that each option is in its range.

    Raises:
        ValueError: it is not; the message names the option and the range.
    """
    for name, valid, rule in (
        ("lr", not isinstance(options["lr"], Tensor) or options["lr"].dim() == 0, "a 0-d tensor"),
        ("lr", bool((torch.as_tensor(options["lr"]) >= 0).all()), ">= 0"),
        ("momentum", 0 <= options["momentum"] < 1, "in [0, 1)"),
        ("weight_decay", options["weight_decay"] >= 0, ">= 0"),
        ("trust_coefficient", options["trust_coefficient"] > 0, "> 0"),
        ("eps", options["eps"] >= 0, ">= 0"),
        ("dialect", options["dialect"] in DIALECTS, "one of " + ", ".join(DIALECTS)),
        (
            "denominator",
            options["denominator"] in DENOMINATORS,
            "one of " + ", ".join(DENOMINATORS),
        ),
        (
            "nesterov",
            not options["nesterov"] or options["momentum"] > 0,
            "False unless momentum > 0",
        ),
        ("adapt", options["adapt"] in (None, False, True), "True, False or None"),
    ):
        if not valid:
            raise ValueError(f"{name} must be {rule}, not {options[name]!r}")


def check_keys(
    group: Mapping[str, Any],
    of_optimizer: Mapping[str, Any],
    *,
    options: Sequence[str] = OPTIONS,
    optimizer: str = "LARS",
    only_options: bool = False,
) -> None:
    """Check that a parameter group has no key that would have no effect.

    Args:
        group: the parameter group.
        of_optimizer: the options of the whole optimizer by name. A group may repeat them, as the
            groups of ``ZeroRedundancyOptimizer`` do, but not change them.
        options: the options of a group.
        optimizer: name of the optimizer, for errors.
        only_options: refuse also the keys that torch and schedulers keep in a group.

    Raises:
        ValueError: it has; the message names the key and what is valid.
    """
    for key in group:
        if key in options or (key in _NOT_OPTIONS and not only_options):
            continue
        if key in of_optimizer:
            if group[key] == of_optimizer[key]:
                continue
            raise ValueError(
                f"{key} is not an option of a parameter group; valid: "
                f"{optimizer}(..., {key}=...), for all groups"
            )
        close = get_close_matches(str(key), options, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"{key!r} is not an option of a parameter group; {hint}valid: {', '.join(options)}"
        )


def check_parameter(name: str, parameter: Tensor, optimizer: str = "LARS") -> None:
    """Check that an optimizer that takes norms of tensors can update a parameter.

    Raises:
        TypeError: it is complex, or flattened by FSDP1; the message gives its name.
    """
    if parameter.is_complex():
        raise TypeError(f"parameter {name} is complex; {optimizer} takes real parameters")
    if is_flattened_by_fsdp1(parameter):
        raise TypeError(
            f"parameter {name} is flattened by FSDP1, so that the norms of its tensors are not "
            "known; valid: FSDP2's torch.distributed.fsdp.fully_shard"
        )
