"""Initial weights: from a file or timm, or what a model computes from training images.

Those of a file are of the same model, or of a shallower one of its family.

Starting from a shallower model is the third technique of Jia et al. 2018 (arXiv 1807.11205). Blocks
are matched by stage and by their place in it, and copied. The additional blocks of each stage start
as the identity, so that the deeper network begins as the same function as the shallower one: the
last norm layer of a new block has gamma and beta zero, which leaves ``relu(0 + x)``, and that is
``x``, since ``x`` is the output of the ReLU that ends the block before. This also holds in training
mode.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ...pipeline import Loader, Source, Synthetic, Transform, hold_out
from ..errors import RecipeError
from ..models.build import classifier, residual_blocks
from ..published import TIMM, weights_of
from ..schema.data import Data
from .folder.weights import read_weights, source_of

_METHOD = "init_from_images"
_BATCH = 250


def start_from(path: str, model: nn.Module, name: str) -> str:
    """Copy weights from a file, a folder or timm into a model, in place."""
    passed_over: tuple[str, ...] = ()
    if path.startswith(TIMM):
        theirs = weights_of(path.removeprefix(TIMM), "init.from")
    else:
        source, passed_over = source_of(Path(path))
        theirs = read_weights(source)
    ours = model.state_dict()
    head = classifier(model, ours)
    fits = all(key in theirs and theirs[key].shape == ours[key].shape for key in head)
    fresh_head = set() if fits else head
    theirs = {key: value for key, value in theirs.items() if key not in fresh_head}
    new = _new_blocks(model, theirs)
    valid = f"valid: weights of {name}, or of a shallower model of its family"
    for key, value in theirs.items():
        if key not in ours:
            raise RecipeError(f"init.from: {path} has {key}, which is not part of {name}; {valid}")
        if value.shape != ours[key].shape:
            raise RecipeError(
                f"init.from: {path} has {key} of shape {_text(value)}, where {name} has "
                f"{_text(ours[key])}; {valid}"
            )
    for key in ours:
        optional = key in fresh_head or key.endswith("num_batches_tracked")  # absent from old files
        if key not in theirs and not optional and not key.startswith(tuple(f"{b}." for b in new)):
            raise RecipeError(f"init.from: {path} has no {key}, which {name} needs; {valid}")
    with torch.no_grad():
        for key, value in theirs.items():
            ours[key].copy_(value)  # which shares memory with the model
    for block, norm in new.items():
        _make_identity(model, block, norm)
    summary = f"weights from {path}: {len(theirs)} tensors copied"
    if new:
        summary += f", {len(new)} new block{'s start' if len(new) > 1 else ' starts'} as identity"
    summary += ", classifier newly initialized" if fresh_head else ""
    return "\n  ".join([summary, *passed_over])


def _new_blocks(model: nn.Module, theirs: dict[str, Tensor]) -> dict[str, nn.Module]:
    """Return the residual blocks that a shallower model lacks, with their last norm layers."""
    blocks = residual_blocks(model)
    found = {}
    for block, norm in blocks.items():
        absent = not any(key.startswith(f"{block}.") for key in theirs)
        if absent and _before(block) in blocks and model.get_submodule(block).downsample is None:
            found[block] = norm
    return found


def _make_identity(model: nn.Module, block: str, norm: nn.Module) -> None:
    """Initialize a new block as the identity, and check on random input that it is."""
    for parameter in norm.parameters():
        nn.init.zeros_(parameter)
    inner, before = model.get_submodule(block), model.get_submodule(_before(block))
    first = next(layer for layer in before.modules() if isinstance(layer, nn.Conv2d))
    modes = {module: module.training for module in (*inner.modules(), *before.modules())}
    noise = torch.randn(1, first.in_channels, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        given = before.eval()(noise)
        same = torch.equal(inner.eval()(given), given)
    for module, training in modes.items():
        module.training = training
    if not same:
        raise RecipeError(
            f"init.from: the new block {block} would not start as the identity: its activation "
            "is not idempotent; valid: a model whose blocks end in a ReLU"
        )


def _before(block: str) -> str:
    """Name of the block before ``block`` in its stage; no existing block before the first one."""
    stage, _, index = block.rpartition(".")
    return f"{stage}.{int(index) - 1}" if index.isdigit() else ""


def _text(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "a single number"


# --- from training images ---------------------------------------------------------------------


def start_from_images(
    count: int | None,
    model: nn.Module,
    name: str,
    source: Source,
    transform: Transform,
    data: Data,
    seed: int,
) -> str | None:
    """Call a model's ``init_from_images`` with the number of images that the recipe asks for."""
    initialize = getattr(model, _METHOD, None)
    if count is None:
        if getattr(model, "needs_images", False):
            raise RecipeError(
                f"init.images: {name} sets weights from training images; valid: their number, "
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
    return f"{name} initialized from {count:,} training images"
