"""The images over which batch norm takes its statistics: a recipe's ``batch_norm``.

By default these are the images of one forward pass of a rank, its micro-batch. Fewer images are
slices of it ("ghost" batches); more are the micro-batches of several ranks. Accumulated
micro-batches are forwarded one after the other and cannot share statistics.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...comm import group_of_rank
from ...pipeline import Loader, Phase
from ..errors import RecipeError
from ..ranks import Job
from ..schema.recipe import Recipe
from .norm_layers import GhostBatchNorm, SharedBatchNorm, SharedBatchNormOfGpus


def check_batch_norm(recipe: Recipe, model: nn.Module, phases: Iterable[Phase], ranks: int) -> None:
    """Refuse a ``batch_norm`` that the model as built, the batches or the ranks do not allow."""
    asked, name = recipe.batch_norm, recipe.model.name
    if not (asked.images or asked.ranks):
        return
    key = "batch_norm.images" if asked.images else "batch_norm.ranks"
    layers = _layers(model)
    if not layers:
        raise RecipeError(f"{key}: {name} has no batch norm; valid: null")
    for path, layer in layers.items():
        if type(layer) not in (known := _known()):
            raise RecipeError(
                f"{key}: {path} of {name} is a {type(layer).__name__}, which does not support it; "
                f"valid: null, or a model with {', '.join(kind.__name__ for kind in known)}"
            )
    if ranks % asked.group(ranks):
        raise RecipeError(
            f"batch_norm.ranks: {asked.ranks} does not divide the number of ranks, {ranks}; "
            f"valid: {_divisors(ranks)}"
        )
    for phase in phases:
        micro = phase.micro_batch_size
        if asked.images and micro % asked.images:
            raise RecipeError(
                f"batch_norm.images: {asked.images} does not divide a micro-batch of {micro} "
                f"images; valid: {_divisors(micro)}"
            )


def share_statistics(model: nn.Module, recipe: Recipe, job: Job) -> None:
    """Replace the model's batch norm layers as the recipe's ``batch_norm`` says, in place.

    Ranks that share statistics do so in a process group made for them alone, so that collectives in
    forward and backward cannot be mixed up with those of gradients.
    """
    asked, layers = recipe.batch_norm, _layers(model)
    if asked.images:
        for layer in layers.values():
            GhostBatchNorm.put_in_place_of(layer, asked.images)
    ranks = asked.group(job.world_size)
    if ranks > 1:
        kind = SharedBatchNorm if job.device.type == "cpu" else SharedBatchNormOfGpus
        starts = range(0, job.world_size, ranks)
        group = group_of_rank([range(start, start + ranks) for start in starts])
        assert group is not None  # as it has several ranks
        for layer in layers.values():
            kind.put_in_place_of(layer, group)


def statistics_images(
    recipe: Recipe, model: nn.Module, micro_batch_size: int, world_size: int
) -> int | None:
    """Number of images that share batch statistics; None if the model has no batch norm.

    A micro-batch is what a rank forwards at once. The ranks may be others than this run has.
    """
    if not _layers(model):
        return None
    asked = recipe.batch_norm
    return asked.images or micro_batch_size * asked.group(world_size)


def in_words(recipe: Recipe, model: nn.Module, loader: Loader, world_size: int) -> str:
    """Such as ``batch norm over 32``, the images of each micro-batch; empty without batch norm."""
    micros = (phase.micro_batch_size for phase in loader.timeline.phases)
    sizes = (statistics_images(recipe, model, micro, world_size) for micro in micros)
    numbers = list(dict.fromkeys(f"{size:,}" for size in sizes if size))
    asked, which = recipe.batch_norm, ""
    if asked.images:
        which = " images in slices of a micro-batch"
    elif asked.ranks:
        ranks = f"all {world_size}" if asked.ranks == "all" else asked.ranks
        which = f" images of {ranks} ranks"
    return f"batch norm over {', then '.join(numbers)}{which}" if numbers else ""


def _layers(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}


def _known() -> tuple[type[nn.Module], ...]:
    """Layers whose forward pass can be replaced."""
    from timm.layers import BatchNormAct2d

    return nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, BatchNormAct2d


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
