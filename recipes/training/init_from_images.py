"""Initial weights that a model computes from training images, such as a layer that whitens them."""

from __future__ import annotations

import torch
from torch import nn

from ...pipeline import Loader, Source, Synthetic, Transform, hold_out
from ..errors import RecipeError
from ..schema.data import Data
from .init_from import Start

_METHOD = "init_from_images"
_BATCH = 250


def start_from_images(
    count: int | None,
    model: nn.Module,
    name: str,
    source: Source,
    transform: Transform,
    data: Data,
    seed: int,
) -> Start | None:
    """Call a model's ``init_from_images`` with the number of images that the recipe asks for.

    They are training images drawn at random, the same for every seed, transformed as in evaluation:
    one FP32 tensor of shape ``[N, 3, size, size]`` on the CPU. A model with an attribute
    ``needs_images`` that is true is not trained without.

    Args:
        count: The number of images, ``init.images``.
        model: The model, in FP32 on the CPU.
        name: Its name, for messages.
        source: The training images.
        transform: The transform of evaluation.
        data: The recipe's section of that name.
        seed: The recipe's seed.

    Returns:
        What was done; None if the recipe asks for no images.

    Raises:
        RecipeError: The recipe asks for no images and the model needs some, or it asks for more
            images than there are, or the model has no such method.
        DataError: An image cannot be read.
    """
    initialize = getattr(model, _METHOD, None)
    if count is None:
        if getattr(model, "needs_images", False):
            raise RecipeError(
                f"init.images: {name} sets weights from training images; valid: a number of them, "
                f"such as {min(5000, len(source))}"
            )
        return None
    if initialize is None:
        raise RecipeError(
            f"init.images: {name} has no method {_METHOD}; valid: null, or a model that has it, "
            "such as airbench"
        )
    if count >= len(source):
        raise RecipeError(
            f"init.images: {count} of {len(source)} training images; valid: below {len(source)}"
        )
    if isinstance(source, Synthetic):
        drawn: Source = Synthetic(count, len(source.classes))
    else:
        _, drawn = hold_out(source, count)
    loader = Loader(
        drawn,
        transform,
        batch_size=_BATCH,
        training=False,
        seed=seed,
        backend=data.backend.replace("gpu", "cpu"),
        threads=data.threads,
        on_error=data.on_error,
        verify=data.verify,
    )
    initialize(torch.cat([images for images, _ in loader]))
    return Start(f"{name} initialized from {count:,} training images", "")
