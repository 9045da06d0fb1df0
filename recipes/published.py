"""Weights that timm has published, by their name: ``timm:NAME``.

They come with a ``pretrained_cfg``, such as the mean and standard deviation of their images.
"""

from __future__ import annotations

from typing import Any

from .errors import RecipeError, but_valid

#: What an argument or a key begins with that names weights of timm.
TIMM = "timm:"


def config_of(name: str, key: str) -> dict[str, Any]:
    """The ``pretrained_cfg`` of weights.

    Args:
        name: A name of ``timm.list_pretrained()``; without the tag behind the dot, it is timm's
            default.
        key: Where the user gave the name, for messages.

    Raises:
        RecipeError: timm has no such weights.
    """
    import timm
    from timm.models import get_pretrained_cfg, is_model_pretrained, list_pretrained

    if not is_model_pretrained(name):
        raise RecipeError(
            f"{key}: timm {timm.__version__} has no weights {name!r}"
            f"{but_valid(name, list_pretrained())}: {TIMM} and a name of timm.list_pretrained()"
        )
    return dict(get_pretrained_cfg(name).to_dict())


def weights_of(name: str, key: str) -> dict[str, Any]:
    """The state dict of weights, from the cache of huggingface_hub or else downloaded into it.

    Args:
        name: As for :func:`config_of`.
        key: As there.

    Raises:
        RecipeError: They cannot be downloaded or read.
    """
    import timm
    from huggingface_hub import constants

    try:
        weights: dict[str, Any] = timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # of timm, torch, safetensors, huggingface_hub and its HTTP library
        reason = next(iter(str(error).splitlines()), "").partition(". ")[0].rstrip(".")
        raise RecipeError(
            f"{key}: {TIMM}{name} cannot be read: {type(error).__name__}: {reason}; valid: weights "
            f"in the cache of huggingface_hub, {constants.HF_HUB_CACHE}, or a network that reaches "
            "huggingface.co"
        ) from None
    return weights
