"""The model of a recipe: ours, one of timm, or a user's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import RecipeError, but_valid
from ..schema.dotted_path import is_dotted_path, resolve
from ..schema.sections import Model
from .airbench import Airbench
from .alexnet import AlexNetBN
from .blur_pool import resnet50_blurpool
from .resnet9 import ResNet9

#: Models that timm does not have.
OWN_MODELS: dict[str, Callable[..., nn.Module]] = {
    "airbench": Airbench,
    "alexnet_bn": AlexNetBN,
    "resnet50_blurpool": resnet50_blurpool,
    "resnet9": ResNet9,
}


def build_model(recipe: Model, classes: int) -> nn.Module:
    """Make the model of a recipe, with ``classes`` outputs and randomly initialized weights.

    A dotted path is called as ``factory(num_classes=classes, **args)``.

    Raises:
        RecipeError: There is no such model, or it does not take its arguments.
    """
    make = _maker(recipe.name)
    args: dict[str, Any] = {"num_classes": classes, **recipe.args}
    try:
        model = make(**args)
    except Exception as error:  # of any kind: models check few of their arguments
        raise RecipeError(
            f"model.args: {recipe.name} does not take {recipe.args}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"model.name: {recipe.name} makes a {type(model).__name__}; valid: a factory of "
            "torch.nn.Module"
        )
    return model


def _maker(name: str) -> Callable[..., Any]:
    """The function that makes a model."""
    if is_dotted_path(name):
        return resolve(name, "model.name")
    if name in OWN_MODELS:
        return OWN_MODELS[name]
    import timm

    if not timm.is_model(name):
        known = [*OWN_MODELS, *timm.list_models()]
        raise RecipeError(
            f"model.name: no model {name!r} in timm {timm.__version__}"
            f"{but_valid(name, known)}: {', '.join(OWN_MODELS)}, one of timm.list_models(), or a "
            "dotted path such as mypkg.module:factory"
        )
    return partial(_of_timm, name)


def _of_timm(name: str, **args: Any) -> nn.Module:
    """Make a model of timm. ``aa_layer: blurpool`` is a class, as its ResNets take no name."""
    import timm

    if args.get("aa_layer") == "blurpool":
        args["aa_layer"] = timm.layers.BlurPool2d
    model: nn.Module = timm.create_model(name, pretrained=False, **args)
    return model


def is_of_timm(name: str) -> bool:
    """Whether a ``model.name`` is one of timm."""
    return name not in OWN_MODELS and not is_dotted_path(name)


def check_image_size(model: nn.Module, sizes: set[int]) -> None:
    """Refuse images of other sizes, in pixels, than a model of a fixed size takes: AlexNet-BN."""
    if isinstance(model, AlexNetBN) and (others := sizes - {model.img_size}):
        raise RecipeError(
            f"model.args.img_size: the network takes images of {model.img_size} px, and the run "
            f"has images of {min(others)} px; valid: one size in model.args.img_size, data and "
            "stages"
        )


def residual_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The last norm layer of each residual block, by the block's name.

    A residual block, as in the networks of torchvision and timm, is a module with a ``downsample``
    (which may be None) and layers ``conv1``, ``bn1``, … ``convN``, ``bnN``, where each norm layer
    follows its convolution and the last one has a gamma. Pre-norm blocks, as in transformers, do
    not count.
    """
    blocks = {}
    for path, module in model.named_modules():
        children = [name for name, _ in module.named_children()]
        last = max((int(n[4:]) for n in children if re.fullmatch(r"conv\d", n)), default=0)
        conv, norm = f"conv{last}", f"bn{last}"
        if norm not in children or not hasattr(module, "downsample"):
            continue
        layer = module.get_submodule(norm)
        if children.index(conv) < children.index(norm) and layer.weight is not None:
            blocks[path] = layer
    return blocks


def classifier(model: nn.Module, state: Mapping[str, Tensor]) -> set[str]:
    """Names of the tensors of the layer that outputs the class logits, of those in ``state``."""
    names = getattr(model, "pretrained_cfg", {}).get("classifier") or ()  # as timm declares it
    names = (names,) if isinstance(names, str) else names
    if not names:
        names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1:]
    return {key for key in state if key.rpartition(".")[0] in names}
