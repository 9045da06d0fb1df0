"""The options of LARS that a parameter group may set: their names, ranges and later additions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec

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


_P = ParamSpec("_P")


def named_arguments(init: Callable[_P, None]) -> Callable[_P, None]:
    """Let the constructor of an optimizer say what is valid where an argument is not.

    It then raises TypeError, in one line, for an option that there is not (such as timm's
    ``trust_coeff``), and without a learning rate.
    """
    _, params, *names = inspect.signature(init).parameters

    @wraps(init)
    def checked(*args: _P.args, **options: _P.kwargs) -> None:
        optimizer = type(args[0]).__name__
        for name in (name for name in options if name not in (params, *names)):
            raise TypeError(f"{name!r} is not an option of {optimizer}; {_valid(name, names)}")
        if len(args) < 3 and "lr" not in options:
            raise TypeError(
                f"lr is missing; valid: {optimizer}(params, lr=...), a number >= 0 or a 0-d tensor"
            )
        init(*args, **options)

    return checked


def _valid(name: object, names: Sequence[str]) -> str:
    close = get_close_matches(str(name), names, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid: {', '.join(names)}"


def check_rate(lr: Any, *, waits: bool = False) -> None:
    """Check that a learning rate is in its range; the value of a tensor only if ``waits``.

    Raises:
        ValueError: it is not a number >= 0, or a 0-d tensor of one.
    """
    if isinstance(lr, Tensor) and lr.dim():
        shape = list(lr.shape)
        raise ValueError(f"lr must be a 0-d tensor, such as lr.squeeze(), not one of shape {shape}")
    if (waits or not isinstance(lr, Tensor)) and not holds(lambda: lr >= 0):
        raise ValueError(f"lr must be >= 0, not {lr!r}")


def holds(condition: Callable[[], Any]) -> bool:
    """Whether a condition is true; what cannot be compared with a number is out of its range."""
    try:
        return bool(condition())
    except TypeError:
        return False


def check_options(options: Mapping[str, Any]) -> None:
    """Check that each option is in its range.

    Raises:
        ValueError: it is not; the message names the option and the range.
    """
    check_rate(options["lr"], waits=True)
    for name, valid, rule in (
        ("momentum", holds(lambda: 0 <= options["momentum"] < 1), "in [0, 1)"),
        ("weight_decay", holds(lambda: options["weight_decay"] >= 0), ">= 0"),
        ("trust_coefficient", holds(lambda: options["trust_coefficient"] > 0), "> 0"),
        ("eps", holds(lambda: options["eps"] >= 0), ">= 0"),
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
        raise ValueError(f"{key!r} is not an option of a parameter group; {_valid(key, options)}")


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
