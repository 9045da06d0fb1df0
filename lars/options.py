"""The options of LARS that a parameter group may set: their names and ranges."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec

from torch import Tensor

from .names import DENOMINATORS
from .reference import DIALECTS
from .sharding import is_flattened_by_fsdp1

#: A test of a value, which may raise TypeError, and what is valid in words.
Range = tuple[Callable[[Any], Any], str]

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
    """Let a constructor say in one line what is valid, where an option is unknown or lr missing."""
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
    """Raise ValueError unless a rate is a number >= 0 or a 0-d tensor, read only if ``waits``."""
    if isinstance(lr, Tensor) and lr.dim():
        shape = list(lr.shape)
        raise ValueError(f"lr must be a 0-d tensor, such as lr.squeeze(), not one of shape {shape}")
    if (waits or not isinstance(lr, Tensor)) and not _holds(lambda lr: lr >= 0, lr):
        raise ValueError(f"lr must be >= 0, not {lr!r}")


def one_of(names: Iterable[str]) -> Range:
    """Return the range of an option that is one of some names."""
    return (lambda value: value in names), "one of " + ", ".join(names)


FLAG: Range = (lambda value: value in (False, True), "True or False")

#: The range of each option of LARS but ``lr``: a test of a value, and its words.
RANGES: dict[str, Range] = {
    "momentum": (lambda value: 0 <= value < 1, "in [0, 1)"),
    "weight_decay": (lambda value: value >= 0, ">= 0"),
    "trust_coefficient": (lambda value: value > 0, "> 0"),
    "eps": (lambda value: value >= 0, ">= 0"),
    "dialect": one_of(DIALECTS),
    "nesterov": FLAG,
    "trust_clip": FLAG,
    "denominator": one_of(DENOMINATORS),
    "decay_at_zero_norm": FLAG,
    "maximize": FLAG,
    "adapt": (lambda value: value in (None, False, True), "True, False or None"),
}

#: Every option that a parameter group may set.
OPTIONS = ("lr", *RANGES)


def check_options(options: Mapping[str, Any], ranges: Mapping[str, Range] = RANGES) -> None:
    """Raise ValueError, with the name and the range, for an option that is not in its range."""
    check_rate(options["lr"], waits=True)
    for name, (test, rule) in ranges.items():
        if not _holds(test, options[name]):
            raise ValueError(f"{name} must be {rule}, not {options[name]!r}")
    if options["nesterov"] and not options["momentum"] > 0:
        raise ValueError(f"nesterov must be False unless momentum > 0, not {options['nesterov']!r}")


def _holds(test: Callable[[Any], Any], value: Any) -> bool:
    """Whether a value passes a test; what cannot be compared with a number does not."""
    try:
        return bool(test(value))
    except TypeError:
        return False


def check_keys(
    group: Mapping[str, Any],
    of_optimizer: Mapping[str, Any],
    *,
    options: Sequence[str] = OPTIONS,
    optimizer: str = "LARS",
    only_options: bool = False,
) -> None:
    """Raise ValueError for a key that would have no effect, or would change ``of_optimizer``."""
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
    """Raise TypeError, with its name, for a parameter that is complex or flattened by FSDP1."""
    if parameter.is_complex():
        raise TypeError(f"parameter {name} is complex; {optimizer} takes real parameters")
    if is_flattened_by_fsdp1(parameter):
        raise TypeError(
            f"parameter {name} is flattened by FSDP1, so that the norms of its tensors are not "
            "known; valid: FSDP2's torch.distributed.fsdp.fully_shard"
        )
