"""The model of a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import RecipeError, but_valid
from ..schema.sections import Model
from .alexnet import AlexNetBN
from .resnet9 import ResNet9

#: The models that timm does not have.
OWN_MODELS: dict[str, Callable[..., nn.Module]] = {"alexnet_bn": AlexNetBN, "resnet9": ResNet9}


def build_model(recipe: Model, classes: int) -> nn.Module:
    """The model that a recipe names, timm's or our own, with ``classes`` outputs and fresh weights.

    Raises:
        RecipeError: there is no such model, or it does not take the arguments.
    """
    import timm

    own = OWN_MODELS.get(recipe.name)
    if own is None and not timm.is_model(recipe.name):
        known = [*OWN_MODELS, *timm.list_models()]
        raise RecipeError(
            f"model.name: no model {recipe.name!r} in timm {timm.__version__}"
            f"{but_valid(recipe.name, known)}: {', '.join(OWN_MODELS)}, or one of "
            "timm.list_models()"
        )
    args: dict[str, Any] = {"num_classes": classes, **recipe.args}
    try:
        model: nn.Module = (
            own(**args) if own else timm.create_model(recipe.name, pretrained=False, **args)
        )
    except Exception as error:  # of any kind: models check little of what they are given
        maker = own.__name__ if own else "timm.create_model"
        raise RecipeError(
            f"model.args: {recipe.name} does not take {recipe.args}: "
            f"{type(error).__name__}: {error}; valid: what {maker} takes"
        ) from error
    if recipe.zero_init_last_norm and not zero_init_last_norm(model):
        raise RecipeError(
            f"model.zero_init_last_norm: {recipe.name} has no residual block that ends in a norm "
            "layer; false leaves it as it is"
        )
    return model


def check_image_size(model: nn.Module, sizes: set[int]) -> None:
    """Raise RecipeError where a model is made for images of one size, and gets others.

    Args:
        model: AlexNet-BN is for images of one size.
        sizes: of the images, in pixels on each side.
    """
    if isinstance(model, AlexNetBN) and (others := sizes - {model.img_size}):
        raise RecipeError(
            f"model.args.img_size: the network is for images of {model.img_size} px, and there are "
            f"some of {min(others)} px; valid: one size in model.args.img_size, data and stages"
        )


def zero_init_last_norm(model: nn.Module) -> int:
    """Zero the gamma of the last norm layer in every residual block, in place.

    Each block then starts as the identity (Goyal et al. 2017, section 5.1).

    Returns:
        How many blocks there are.
    """
    norms = residual_blocks(model)
    for norm in norms.values():
        nn.init.zeros_(norm.weight)  # type: ignore[arg-type]
    return len(norms)


def residual_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The last norm layer of each residual block, by the block's name.

    A block is what torchvision's and timm's residual networks are made of: a module with a
    ``downsample`` (which may be None) and layers ``conv1``, ``bn1``, … ``convN``, ``bnN``, each
    norm after its convolution and the last with a gamma. Blocks that normalise first, such as
    those of transformers, are not.
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
