"""The optimizers that a recipe can name: one table, which everything about them is read from.

An entry says which keys of a recipe an optimizer takes and where its class is; the schema, the
builder, the messages, the notices of overrides without effect, the completion and the pages of the
documentation read it. Besides the table, ``optimizer.name`` takes a class of ``torch.optim`` and a
user's factory by its dotted path. Classes are imported when they are asked for.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..errors import RecipeError, but_valid
from .dotted_path import is_dotted_path, resolve


@dataclass(frozen=True)
class Entry:
    """An optimizer that a recipe can name."""

    name: str
    what: str  # and where it comes from, in a phrase
    #: Imports what makes it, called as ``make(groups, lr, **options)``.
    load: Callable[[], Callable[..., Any]]
    keys: tuple[str, ...] = ()  # those of the section that are arguments of the same name
    adapts: bool = False  # whether it heeds ``adapt_bias_and_norm``
    orthogonalizes: bool = False  # whether its groups tell hidden weights from the others
    #: Whether it unscales FP16 gradients and, with ``master_weights=True``, keeps FP32 masters.
    masters: bool = False
    #: Whether it has trust ratios to record, with its ``optimizer.args``; None: it never has.
    trust_ratios: Callable[[Mapping[str, Any]], bool] | None = None
    #: Turns ``optimizer.args`` as a recipe holds them into keyword arguments.
    arguments: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    trainers: tuple[str, ...] = ()  # names in ``optimizer.args`` that are for the trainer

    @property
    def own_keys(self) -> tuple[str, ...]:
        """Keys of the section ``optimizer`` that not every optimizer takes."""
        return (*self.keys, *(["adapt_bias_and_norm"] if self.adapts else []))

    @property
    def is_dotted(self) -> bool:
        """Whether it is a user's own."""
        return is_dotted_path(self.name)


def _of(module: str, name: str) -> Callable[[], Callable[..., Any]]:
    return lambda: getattr(import_module(module, __package__), name)


#: Options of Muon's groups, and what sets them.
_OF_GROUPS = {
    "lr": "optimizer.lr and optimizer.args.others.lr_scale",
    "weight_decay": "optimizer.weight_decay",
    "adapt": "optimizer.adapt_bias_and_norm",
    "orthogonal": "the trainer",
}
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def _muon_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """With a dtype for its name, and without ``share``, which is for the trainer."""
    found = dict(args)
    share = found.pop("share", True)
    if not isinstance(share, bool):
        raise RecipeError(f"optimizer.args.share: must be true or false, not {share!r}")
    others = found.get("others") or {}
    if not isinstance(others, dict):
        raise RecipeError(
            f"optimizer.args.others: must be a mapping, not {others!r}; valid: such as "
            "{rule: sgd, lr_scale: 1.25, momentum: 0.85}"
        )
    for key, by in _OF_GROUPS.items():
        if key in others:
            raise RecipeError(f"optimizer.args.others.{key}: set by {by}; valid: leave it out")
    scale = others.get("lr_scale", 1)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < math.inf:
        raise RecipeError(f"optimizer.args.others.lr_scale: must be a number >= 0, not {scale!r}")
    name = found.get("ns_dtype")
    if name is not None:
        import torch

        if name not in _DTYPES:
            raise RecipeError(
                f"optimizer.args.ns_dtype: no dtype {name!r}{but_valid(str(name), [*_DTYPES])}: "
                f"{', '.join(_DTYPES)}, or null for the device's own"
            )
        found["ns_dtype"] = getattr(torch, name)
    return found


def _muon_has_ratios(args: Mapping[str, Any]) -> bool:
    others = args.get("others")
    rule = others.get("rule") if isinstance(others, dict) else None
    return args.get("adjust_lr_fn") == "trust_ratio" or rule == "lars"


#: Every optimizer that has a name of ours.
OPTIMIZERS = {
    entry.name: entry
    for entry in (
        Entry(
            "lars",
            "LARS (You et al. 2017), largebatch.lars.LARS",
            _of("...lars", "LARS"),
            keys=("momentum", "nesterov", "trust_coefficient", "dialect"),
            adapts=True,
            masters=True,
            trust_ratios=lambda args: True,
        ),
        Entry(
            "sgd",
            "SGD with momentum, torch.optim.SGD",
            _of("torch.optim", "SGD"),
            keys=("momentum", "nesterov"),
        ),
        Entry(
            "lamb",
            "LAMB (You et al. 2019), timm.optim.Lamb, which clips the norm of all gradients to "
            "max_grad_norm, 1 by default",
            _of("timm.optim", "Lamb"),
        ),
        Entry(
            "adamw",
            "AdamW (Loshchilov & Hutter 2017), torch.optim.AdamW",
            _of("torch.optim", "AdamW"),
        ),
        Entry(
            "muon",
            "Muon (Jordan 2024) for hidden weights, with SGD, LARS or AdamW for the others, "
            "largebatch.lars.Muon",
            _of("...lars", "Muon"),
            keys=("momentum", "nesterov", "trust_coefficient"),
            adapts=True,
            orthogonalizes=True,
            masters=True,
            trust_ratios=_muon_has_ratios,
            arguments=_muon_arguments,
            trainers=("share",),
        ),
    )
}

#: Those that unscale FP16 gradients themselves, for messages.
UNSCALING = " or ".join(entry.name for entry in OPTIMIZERS.values() if entry.masters)

#: Classes of torch.optim that cannot take a step of the trainer.
_UNUSABLE = {
    "LBFGS": "evaluates the loss several times in a step",
    "SparseAdam": "takes sparse gradients only",
}

#: Arguments that the trainer gives to an optimizer of the table: ``optimizer.args`` does not.
_GIVEN = ("params", "lr", "weight_decay", "adapt", "master_weights", "process_group")


def entry_of(name: str) -> Entry:
    """The entry of a valid ``optimizer.name``: of the table, or made for a class or a path."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if is_dotted_path(name):
        return Entry(name, "", lambda: resolve(name, "optimizer.name"))
    return Entry(name, "", _of("torch.optim", name))


def known(name: str) -> str:
    """Return a name that :func:`entry_of` takes, else raise ValueError with those that it takes."""
    if name in OPTIMIZERS or is_dotted_path(name):
        return name
    import torch.optim

    def usable(attribute: str) -> bool:
        found = getattr(torch.optim, attribute)
        is_optimizer = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
        return is_optimizer and found is not torch.optim.Optimizer and attribute not in _UNUSABLE

    names = [*OPTIMIZERS, *filter(usable, dir(torch.optim))]
    if name in names:
        return name
    near = next((k for k in names if k.casefold() == name.casefold()), name)
    reason = f"{name} {_UNUSABLE[name]}" if name in _UNUSABLE else f"no optimizer {name!r}"
    raise ValueError(
        f"{reason}{but_valid(near, names)}: {', '.join(names)}, or a dotted path such as "
        "mypkg.module:factory"
    )


def set_elsewhere(name: str, argument: str) -> str | None:
    """What sets an argument of an optimizer if ``optimizer.args`` may not, else None."""
    entry = entry_of(name)
    if argument in entry.keys or argument in ("lr", "weight_decay"):
        return f"optimizer.{argument}"
    given = ("params",) if name not in OPTIMIZERS else _GIVEN
    return "the trainer" if argument in given else None


def called(make: Any) -> str:
    """What a class or function is called where users import it from: ``torch.optim.AdamW``."""
    module = ".".join(make.__module__.split(".")[:2])
    return f"{module}.{make.__qualname__}"


def check_arguments(entry: Entry, make: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Refuse the first argument of a recipe that an optimizer does not have, and name its own."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # of some extension modules
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    own = [p.name for p in parameters][1:]  # without the groups
    valid = [n for n in own if not set_elsewhere(entry.name, n)] + [*entry.trainers]
    for name in args:
        if name not in valid:
            whose = entry.name if entry.is_dotted else called(make)
            raise RecipeError(
                f"optimizer.args.{name}: {whose} has no such argument{but_valid(name, valid)}: "
                f"{', '.join(valid) or 'none'}"
            )


def users(key: str) -> str:
    """The optimizers of the table that take a key, such as ``"lars and muon"``."""
    names = [entry.name for entry in OPTIMIZERS.values() if key in entry.own_keys]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def of_others(name: str, keys: Iterable[str]) -> tuple[str, ...]:
    """A line for each key that the optimizer ``name`` does not take and others do.

    They are no errors: a sweep over ``optimizer.name`` may well give LARS's keys to every run.
    """
    others = {f"optimizer.{key}" for entry in OPTIMIZERS.values() for key in entry.own_keys}
    others -= {f"optimizer.{key}" for key in entry_of(name).own_keys}
    return tuple(
        f"{key} has no effect: optimizer.name is {name}, and it is for "
        f"{users(key.removeprefix('optimizer.'))} only"
        for key in dict.fromkeys(keys)
        if key in others
    )
