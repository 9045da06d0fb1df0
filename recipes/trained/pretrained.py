"""Published weights of timm by their name, with the images that they were measured on.

Weights of timm come with a ``pretrained_cfg``: size, crop and interpolation of evaluated images,
and the mean and standard deviation that they are normalised by. Where it has a size and a crop for
testing, timm's ``validate.py`` and its tables of results take these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...pipeline import INTERPOLATIONS
from ..errors import RecipeError
from ..published import TIMM, config_of, weights_of
from ..schema.load import load_content
from .source import KEY, Trained, open_trained


def open_weights(path: Path, overrides: Iterable[str] = (), **options: Any) -> Trained:
    """Read weights as :func:`open_trained` does, or the published ones of ``timm:NAME``."""
    if not str(path).startswith(TIMM):
        return open_trained(path, overrides, **options)
    if given := [name for name in ("ema", "recipe") if options.get(name)]:
        raise RecipeError(
            f"--{given[0]}: not for {path}, which has settings and weights of its own"
        )
    return _published(str(path).removeprefix(TIMM), overrides)


def _published(name: str, overrides: Iterable[str]) -> Trained:
    import timm

    about = config_of(name, KEY)
    name = ".".join(part for part in (about["architecture"], about.get("tag")) if part)
    called = f"{TIMM}{name}"
    if not about["num_classes"]:
        raise RecipeError(
            f"{KEY}: {called} has no classifier, but gives features; valid: weights with classes"
        )
    content = {
        "model": {"name": name},
        "data": _images_of(about, called),
        # An evaluation reads none of these, but a recipe has to have them.
        "batch_size": 256,
        "epochs": 1,
        "optimizer": {"name": "sgd", "lr": 1},
    }
    loaded = load_content(content, overrides, called=called)
    return Trained(
        source=Path(called),
        weights=weights_of(name, KEY),
        loaded=loaded,
        classes=_classes_of(about),
        origin=f"timm {timm.__version__}",
    )


def _images_of(about: dict[str, Any], called: str) -> dict[str, Any]:
    """The keys of ``data`` that make the images of timm's evaluation."""
    from timm.data import resolve_data_config

    config = resolve_data_config(pretrained_cfg=about, use_test_size=True)
    channels, height, width = config["input_size"]
    crop, interpolation = config["crop_mode"], config["interpolation"]
    needs = {
        f"images of {channels} channels": channels == 3,
        f"images of {height} x {width} px": height == width,
        f"the crop mode {crop}": crop == "center",
        f"the interpolation {interpolation}": interpolation in INTERPOLATIONS,
    }
    if unmet := [need for need, is_met in needs.items() if not is_met]:
        raise RecipeError(
            f"{KEY}: {called} was measured with {unmet[0]}, which evaluate does not make; valid: "
            f"weights for square RGB images, central crops, {' or '.join(INTERPOLATIONS)}"
        )
    return {
        "image_size": height,
        "eval_size": height,
        "eval_resize": math.floor(height / config["crop_pct"]),
        "eval_interpolation": interpolation,
        "mean": list(config["mean"]),
        "std": list(config["std"]),
    }


def _classes_of(about: dict[str, Any]) -> tuple[str, ...]:
    """Names of the classes, WordNet's for ImageNet; empty if timm does not tell them."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    if about.get("label_names"):
        return tuple(about["label_names"])
    subset = infer_imagenet_subset(about)
    return tuple(ImageNetInfo(subset).label_names()) if subset else ()
