"""The optimizer of a recipe: LARS, SGD, one of torch, or a user's own.

A user's factory, such as ``mypkg.module:factory`` or ``timm.optim:Lamb``, is called as
``factory(groups, lr=lr, **args)``. ``groups`` is a list of parameter groups as torch takes them:
``params`` are pairs of name and parameter, ``weight_decay`` is 0 for biases and norm layers unless
the recipe decays them, and ``adapt`` is for optimizers that scale the update of each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.optim
from torch import nn
from torch.optim import SGD, Optimizer

from ...amp import PRECISIONS, MasterWeights
from ...lars import LARS, is_bias_or_norm, split_parameters
from ..errors import RecipeError
from ..schema.dotted_path import is_dotted_path, resolve
from ..schema.recipe import Recipe


def build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Make the optimizer over the model's parameters, grouped by weight decay and trust ratio.

    In ``*-master`` precisions it keeps FP32 master weights: LARS itself, others through
    :class:`~largebatch.amp.MasterWeights`, unless they declare ``master_weights = True``.

    Raises:
        RecipeError: There is no such optimizer, it does not take its arguments, or it does not
            work in the recipe's precision.
    """
    options = recipe.optimizer
    masters = recipe.precision in PRECISIONS and PRECISIONS[recipe.precision].masters
    groups = split_parameters(
        model,
        options.weight_decay,
        no_decay=_none if options.decay_bias_and_norm else is_bias_or_norm,
        no_adapt=_none if options.adapt_bias_and_norm else is_bias_or_norm,
    )
    if options.bias_lr_scale != 1:
        groups = _scale_biases(groups, model, options.lr, options.bias_lr_scale)
    if options.name == "lars":
        return LARS(
            groups,
            options.lr,
            momentum=options.momentum,
            trust_coefficient=options.trust_coefficient,
            eps=options.eps,
            dialect=options.dialect,
            denominator=options.denominator,
            trust_clip=options.trust_clip,
            nesterov=options.nesterov,
            master_weights=masters,
        )
    if options.name == "sgd":
        optimizer: Optimizer = SGD(groups, options.lr, options.momentum, nesterov=options.nesterov)
    else:
        optimizer = _other(recipe, groups)
    if not masters or getattr(optimizer, "master_weights", False):
        return optimizer
    try:
        return MasterWeights(optimizer)
    except ValueError as error:  # it has state of which it does not say that it is initial
        raise RecipeError(
            f"optimizer.name: {options.name} has state before its first step, without step 0 in "
            "it, so it cannot have master weights, which "
            f"precision={recipe.precision} needs; valid: fp32, bf16 or fp16"
        ) from error


def _scale_biases(
    groups: list[dict[str, Any]], model: nn.Module, lr: float, scale: float
) -> list[dict[str, Any]]:
    """Split biases and norms from the other parameters of each group, and scale their rate.

    The scheduler keeps the ratio of the groups' rates.
    """
    biases = {
        parameter
        for group in split_parameters(model, 1.0, no_decay=is_bias_or_norm, no_adapt=_none)
        if not group["weight_decay"]
        for _, parameter in group["params"]
    }
    parts = []
    for group in groups:
        others = [(name, p) for name, p in group["params"] if p not in biases]
        scaled = [(name, p) for name, p in group["params"] if p in biases]
        if others:
            parts.append({**group, "params": others})
        if scaled:
            parts.append({**group, "params": scaled, "lr": lr * scale})
    return parts


def place_state(optimizer: Optimizer) -> None:
    """Move state that an optimizer made when it was built to the device of its parameters."""
    if optimizer.state_dict()["state"]:  # of a wrapped optimizer too
        optimizer.load_state_dict(optimizer.state_dict())


def _other(recipe: Recipe, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of torch, or a user's own."""
    options = recipe.optimizer
    if is_dotted_path(options.name):
        make: Callable[..., Any] = resolve(options.name, "optimizer.name")
        name = options.name
    else:
        make = getattr(torch.optim, options.name)
        name = f"torch.optim.{options.name}"
    try:
        optimizer = make(groups, lr=options.lr, **options.args)
    except Exception as error:  # of any kind: it may be the user's code
        raise RecipeError(
            f"optimizer.args: {name} does not take lr={options.lr:g} and {options.args}: "
            f"{type(error).__name__}: {error}; valid: what {name} takes"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise RecipeError(
            f"optimizer.name: {name} makes a {type(optimizer).__name__}; valid: a factory of "
            "torch.optim.Optimizer"
        )
    ours = not is_dotted_path(options.name)
    if ours and options.weight_decay and "weight_decay" not in optimizer.defaults:
        raise RecipeError(f"optimizer.weight_decay: {name} has none; valid: 0")
    unscales = getattr(optimizer, "_step_supports_amp_scaling", False)
    if recipe.precision == "fp16-pure" and recipe.loss_scale != "none" and not unscales:
        raise RecipeError(
            f"precision: {name} cannot unscale FP16 gradients; valid with fp16-pure: "
            "optimizer.name lars, or loss_scale none"
        )
    return optimizer


def _none(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    return False
