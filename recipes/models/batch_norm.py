"""Over which images batch norm takes its statistics: the recipe's ``batch_norm``.

By default over what a rank forwards at once, its micro-batch. Fewer images are slices of it
("ghost" batches), more are the micro-batches of several ranks. Accumulated micro-batches are
forwarded one after the other and cannot share statistics.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...pipeline import Loader
from ..errors import RecipeError
from ..ranks import Job
from ..schema.recipe import Recipe
from .norm_layers import GhostBatchNorm, SharedBatchNorm, SharedBatchNormOfGpus


def check_batch_norm(recipe: Recipe, model: nn.Module, loader: Loader, world_size: int) -> None:
    """See that the model, the batches and the ranks allow what the recipe asks for.

    Args:
        recipe: checked for itself.
        model: as it was built.
        loader: of the training images; all stages of its batches are looked at.
        world_size: number of ranks.

    Raises:
        RecipeError: they do not.
    """
    asked, name = recipe.batch_norm, recipe.model.name
    if asked.over == "micro-batch":
        return
    layers = _layers(model)
    if not layers:
        raise RecipeError(f"batch_norm.over: {name} has no batch norm; valid: micro-batch")
    known = _known()
    for path, layer in layers.items():
        if type(layer) not in known:
            raise RecipeError(
                f"batch_norm.over: {path} of {name} is a {type(layer).__name__}, which cannot be "
                f"had over {asked.over}; valid: micro-batch, or a model with "
                f"{', '.join(kind.__name__ for kind in known)}"
            )
    if asked.ranks and world_size % asked.ranks:
        raise RecipeError(
            f"batch_norm.ranks: {asked.ranks} does not divide the number of ranks, {world_size}; "
            f"valid: {_divisors(world_size)}"
        )
    for phase in loader.phases:
        micro = phase.micro_batch_size
        if asked.images and micro % asked.images:
            raise RecipeError(
                f"batch_norm.images: {asked.images} does not divide a micro-batch of {micro} "
                f"images; valid: {_divisors(micro)}"
            )
        accumulated = phase.accumulation(world_size)
        if asked.over == "rank" and accumulated > 1:
            raise RecipeError(
                f"batch_norm.over: rank, but a rank's {micro * accumulated} images of a step are "
                f"forwarded {micro} at a time, and those that are not forwarded at once cannot "
                "share statistics; valid: micro-batch, or micro_batch_size=null"
            )


def share_statistics(model: nn.Module, recipe: Recipe, job: Job) -> None:
    """Have a checked model's layers take their statistics over what the recipe says, in place.

    A collective where ranks share them: their process group is made, which is no other's, so that
    these collectives, which stand in forward and backward, cannot be taken for those of gradients.
    """
    asked, layers = recipe.batch_norm, _layers(model)
    if asked.images:
        for layer in layers.values():
            GhostBatchNorm.put_in_place_of(layer, asked.images)
    ranks = asked.ranks or (job.world_size if asked.over == "global" else 1)
    if ranks > 1:
        timeout = timedelta(seconds=recipe.comm.timeout_seconds)
        kind = SharedBatchNorm if job.device.type == "cpu" else SharedBatchNormOfGpus
        group, _ = dist.new_subgroups(ranks, timeout=timeout)
        for layer in layers.values():
            kind.put_in_place_of(layer, group)


def statistics_images(model: nn.Module, micro_batch_size: int) -> int | None:
    """How many images share batch statistics; None if the model has no batch norm.

    Args:
        model: its layers say it.
        micro_batch_size: per rank and forward pass.
    """
    for layer in _layers(model).values():
        if isinstance(layer, GhostBatchNorm):
            return layer.images
        if isinstance(layer, SharedBatchNorm):
            return micro_batch_size * dist.get_world_size(layer.process_group)
        return micro_batch_size
    return None


def in_words(recipe: Recipe, model: nn.Module, loader: Loader, world_size: int) -> str:
    """How many images share statistics, and which they are; empty without batch norm.

    Such as ``batch norm over 32 images (each micro-batch of a rank)``.
    """
    sizes = (statistics_images(model, phase.micro_batch_size) for phase in loader.phases)
    numbers = list(dict.fromkeys(str(size) for size in sizes if size))
    which = {
        "micro-batch": "each micro-batch of a rank",
        "ghost": "slices of each micro-batch",
        "rank": "all of a rank in a step",
        "group": f"micro-batches of {recipe.batch_norm.ranks} ranks",
        "global": f"micro-batches of all ranks, {world_size}",
    }[recipe.batch_norm.over]
    return f"batch norm over {', then '.join(numbers)} images ({which})" if numbers else ""


def _layers(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}


def _known() -> tuple[type[nn.Module], ...]:
    """The kinds of layers whose forward pass is known."""
    from timm.layers import BatchNormAct2d

    return nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, BatchNormAct2d


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
