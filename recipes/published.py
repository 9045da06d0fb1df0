"""Weights that timm has published, by their name: ``timm:NAME``.

They come with a ``pretrained_cfg``, such as the mean and standard deviation of their images.
"""

from __future__ import annotations

from typing import Any

from .errors import RecipeError, but_valid

#: What an argument or a key begins with that names weights of timm.
TIMM = "timm:"


def config_of(name: str, key: str) -> dict[str, Any]:
    """The ``pretrained_cfg`` of weights."""
    import timm
    from timm.models import get_pretrained_cfg, is_model_pretrained, list_pretrained

    if not is_model_pretrained(name):
        raise RecipeError(
            f"{key}: timm {timm.__version__} has no weights {name!r}"
            f"{but_valid(name, list_pretrained())}: {TIMM} and a name of timm.list_pretrained()"
        )
    return dict(get_pretrained_cfg(name).to_dict())


def weights_of(name: str, key: str) -> dict[str, Any]:
    """The state dict of weights, from the cache of huggingface_hub or else downloaded into it."""
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


def with_normalization(
    content: dict[str, Any], notices: tuple[str, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fill in ``data.mean`` and ``data.std`` where ``init.from`` names weights of timm."""
    init, data = content.get("init"), content.get("data")
    source = init.get("from") if isinstance(init, dict) else None
    if not (isinstance(source, str) and source.startswith(TIMM) and isinstance(data, dict)):
        return content, notices
    config = config_of(source.removeprefix(TIMM), "init.from")
    filled = {k: list(config[k]) for k in ("mean", "std") if config.get(k) and k not in data}
    if not filled:
        return content, notices
    line = f"{' and '.join(f'data.{key}' for key in filled)} of {source}"
    return {**content, "data": {**data, **filled}}, (*notices, line)
