"""The optimizer of a recipe: one of the table, a class of torch, or a user's own.

A user's factory, such as ``mypkg.module:factory`` or ``timm.optim:Adan``, is called as
``factory(groups, lr=lr, **args)``. ``groups`` is a list of parameter groups as torch takes them:
``params`` are pairs of name and parameter, ``weight_decay`` is 0 for biases and norm layers unless
the recipe decays them, and ``adapt`` is for optimizers that scale the update of each layer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...amp import PRECISIONS, MasterWeights
from ...comm import Topology
from ...lars import LARS, Muon, hidden_weights, is_bias_or_norm, split_parameters
from ..errors import RecipeError
from ..ranks import Job
from ..schema.optimizers import OPTIMIZERS, UNSCALING, Entry, called, check_arguments, entry_of
from ..schema.recipe import Recipe
from .build import classifier


def build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Make the optimizer over the parameters of a model, which may be on the CPU still.

    In ``*-master`` precisions it keeps FP32 master weights: itself where it can, others through
    :class:`~largebatch.amp.MasterWeights`, unless they declare ``master_weights = True``.

    Raises:
        RecipeError: There is no such optimizer, a package is missing, it does not take its
            arguments or its parameters, or it does not work in the recipe's precision.
    """
    options, entry = recipe.optimizer, entry_of(recipe.optimizer.name)
    masters = recipe.precision in PRECISIONS and PRECISIONS[recipe.precision].masters
    args = entry.arguments(options.args)
    own = {key: getattr(options, key) for key in entry.keys}
    if entry.masters:
        own["master_weights"] = masters
    optimizer = _made(entry, _groups(recipe, entry, model), options.lr, own, args)
    if not entry.is_dotted and options.weight_decay and "weight_decay" not in optimizer.defaults:
        raise RecipeError(f"optimizer.weight_decay: {called(type(optimizer))} has none; valid: 0")
    unscales = getattr(optimizer, "_step_supports_amp_scaling", False)
    if recipe.precision == "fp16-pure" and recipe.loss_scale != "none" and not unscales:
        raise RecipeError(
            f"precision: {options.name} cannot unscale FP16 gradients; valid with fp16-pure: "
            f"optimizer.name {UNSCALING}, or loss_scale none"
        )
    if not masters or getattr(optimizer, "master_weights", False) or entry.masters:
        return optimizer
    try:
        return MasterWeights(optimizer)
    except ValueError as error:
        raise RecipeError(
            f"optimizer.name: {options.name} has state before its first step, so it cannot have "
            f"master weights, which precision={recipe.precision} needs; valid: fp32, bf16 or fp16"
        ) from error


def _groups(recipe: Recipe, entry: Entry, model: nn.Module) -> list[dict[str, Any]]:
    """The parameter groups, with a rate where it is not ``optimizer.lr``."""
    options = recipe.optimizer
    only: dict[str, Any] = {}
    if entry.orthogonalizes:
        only["orthogonal"] = hidden_weights(model)
    groups = split_parameters(
        model,
        options.weight_decay,
        no_decay=_none if options.decay_bias_and_norm else is_bias_or_norm,
        no_adapt=_none if options.adapt_bias_and_norm else is_bias_or_norm,
        **only,
    )
    if entry.orthogonalizes and not any(group["orthogonal"] for group in groups):
        raise RecipeError(
            f"optimizer.name: {recipe.model.name} has no weights for {options.name}: hidden linear "
            "layers and convolutions, neither the first nor the last; valid: another optimizer"
        )
    if entry.orthogonalizes:
        scale = (options.args.get("others") or {}).get("lr_scale", 1)
        for group in groups:
            if scale != 1 and not group["orthogonal"]:
                group["lr"] = options.lr * scale
    if options.bias_lr_scale != 1:
        groups = _scaled(groups, _biases(model), options.lr, options.bias_lr_scale)
    if options.body_lr_scale != 1:
        named = dict(model.named_parameters())
        head = classifier(model, named)
        if not head:
            raise RecipeError(
                f"optimizer.body_lr_scale: {recipe.model.name} has no classifier, a linear layer "
                "at its end; valid: 1"
            )
        body: set[Tensor] = {p for name, p in named.items() if name not in head}
        groups = _scaled(groups, body, options.lr, options.body_lr_scale)
    return groups


def _biases(model: nn.Module) -> set[Tensor]:
    """The biases of a model, and the parameters of its norm layers."""
    groups = split_parameters(model, 1.0, no_decay=is_bias_or_norm, no_adapt=_none)
    return {p for group in groups if not group["weight_decay"] for _, p in group["params"]}


def _scaled(
    groups: list[dict[str, Any]], chosen: set[Tensor], lr: float, scale: float
) -> list[dict[str, Any]]:
    """Split the chosen parameters off each group, and scale their rate, a ratio that is kept."""
    parts = []
    for group in groups:
        others = [(name, p) for name, p in group["params"] if p not in chosen]
        scaled = [(name, p) for name, p in group["params"] if p in chosen]
        if others:
            parts.append({**group, "params": others})
        if scaled:
            parts.append({**group, "params": scaled, "lr": group.get("lr", lr) * scale})
    return parts


def _made(
    entry: Entry,
    groups: list[dict[str, Any]],
    lr: float,
    own: dict[str, Any],
    args: dict[str, Any],
) -> Optimizer:
    """Import the optimizer's class and call it, and explain what is wrong with the recipe."""
    try:
        make = entry.load()
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"optimizer.name: {entry.name} needs {error.name}, which is not installed; valid: "
            "pip install 'largebatch[recipes]', or another optimizer"
        ) from None
    check_arguments(entry, make, args)
    name = entry.name if entry.is_dotted else called(make)
    try:
        optimizer = make(groups, lr=lr, **own, **args)
    except Exception as error:  # of any kind: it may be the user's code
        if isinstance(error, ValueError) and make in (LARS, Muon):  # it says what is valid
            raise RecipeError(f"optimizer.args: {error}") from error
        ours = entry.name.lower()
        hint = (
            f"; valid: optimizer.name={ours}" if ours in OPTIMIZERS and ours != entry.name else ""
        )
        raise RecipeError(
            f"optimizer.args: {name} does not take lr={lr:g} and {args}: "
            f"{type(error).__name__}: {error}{hint}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise RecipeError(
            f"optimizer.name: {name} makes a {type(optimizer).__name__}; valid: a factory of "
            "torch.optim.Optimizer"
        )
    return optimizer


def place_state(optimizer: Optimizer) -> None:
    """Move what an optimizer made when it was built to the device of its parameters.

    These are its state and tensors of its own, such as the flag of some fused optimizers.
    """
    if optimizer.state_dict()["state"]:  # of a wrapped optimizer too
        optimizer.load_state_dict(optimizer.state_dict())
    inner = getattr(optimizer, "_inner", optimizer)
    device = next(p.device for group in inner.param_groups for p in group["params"])
    for name, value in vars(inner).items():
        if isinstance(value, Tensor):
            setattr(inner, name, value.to(device))


def settle_on_device(optimizer: Optimizer, job: Job) -> tuple[str, ...]:
    """Move an optimizer's state to its parameters, and let all ranks take LARS's steps alike.

    Parameters of ranks whose steps round differently drift apart unseen. All ranks must call this.
    Returns a line where they take ``foreach``, as Triton launches no kernel on one of them, which
    is a RecipeError if the recipe asks for Triton.
    """
    place_state(optimizer)
    if job.device.type != "cuda" or not isinstance(optimizer, LARS | Muon):
        return ()
    if optimizer.implementation not in ("auto", "triton"):
        return ()
    with job.raise_on_all_ranks():  # a device that fails
        error = optimizer.triton_launch_error()
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(job.gather(error)) if text]
    if not failed:
        return ()
    problem = f"Triton launches no kernel on {failed[0]}"
    if optimizer.implementation == "triton":
        key = "optimizer.args.implementation"
        raise RecipeError(f"{key}: triton, but {problem}; valid: auto or foreach")
    optimizer.implementation = "foreach"
    return (f"optimizer: foreach on all ranks, as {problem}",)


def share_work(recipe: Recipe, optimizer: Optimizer, topology: Topology) -> None:
    """Let each rank of a node orthogonalise a part of Muon's matrices, and gather the others.

    Across nodes that would take longer than it saves.
    """
    options = recipe.optimizer
    able = "share" in entry_of(options.name).trainers and hasattr(optimizer, "process_group")
    if able and topology.world_size > 1 and options.args.get("share", True):
        optimizer.process_group = topology.groups.intra  # type: ignore[attr-defined]


def in_words(recipe: Recipe, optimizer: Optimizer) -> tuple[str, str]:
    """The optimizer's name for a run's first line, and the rule for what it does not orthogonalize.

    Such as ``muon`` and ``adamw on 0.2 % of the parameters``.
    """
    inner = getattr(optimizer, "_inner", optimizer)
    name, groups = recipe.optimizer.name, inner.param_groups
    if not entry_of(name).orthogonalizes:
        return name, ""
    others = [group for group in groups if not group["orthogonal"]]
    if not others:
        return name, ""
    numbers, rest = (sum(p.numel() for g in of for p in g["params"]) for of in (groups, others))
    rules = " and ".join(dict.fromkeys(group["rule"] for group in others))
    return name, f"{rules} on {100 * rest / numbers:.1f} % of the parameters"


def _none(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    return False
