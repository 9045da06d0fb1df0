"""Weights to start from: those of the same model, or of a shallower one of its family.

The latter is the third trick of Jia et al. 2018 (arXiv 1807.11205). Blocks are matched by stage and
place in it, and copied. The further blocks of each stage start as the identity, so that the deeper
network begins as the same function as the shallower one: the last norm layer of a new block has
gamma and beta zero, which leaves ``relu(0 + x)``, and that is ``x``, since ``x`` comes out of the
ReLU that ends the block before. It is so in training mode too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import RecipeError
from ..models.build import residual_blocks
from .weights import digest, read_weights


@dataclass(frozen=True)
class Start:
    """What the weights of a run were taken from.

    Attributes:
        summary: what was copied and what is new, in one line.
        digest: a hash of the file's content, for ranks to compare.
    """

    summary: str
    digest: str


def start_from(path: str, model: nn.Module, name: str) -> Start:
    """Copy weights from a file or folder into a model, in place.

    A classifier of another number of classes, or none in the file, leaves the model's own as it is.
    All else must fit: each tensor of the file has its place in the model, and each tensor of the
    model is in the file, but for residual blocks that are further down a stage than the file's.

    Args:
        path: as :func:`read_weights` takes it.
        model: in FP32 on the CPU.
        name: of the model, to tell.

    Raises:
        RecipeError: ``path`` holds no weights, or those of another model; the first tensor that
            does not fit is named.
    """
    theirs, ours = read_weights(Path(path)), model.state_dict()
    found = digest(theirs)
    head = _classifier(model, ours)
    fits = all(key in theirs and theirs[key].shape == ours[key].shape for key in head)
    fresh_head = set() if fits else head
    theirs = {key: value for key, value in theirs.items() if key not in fresh_head}
    new = _new_blocks(model, theirs)
    valid = f"valid: weights of {name}, or of a shallower model of its family"
    for key, value in theirs.items():
        if key not in ours:
            raise RecipeError(
                f"init.from: {path} has {key}, for which {name} has no place; {valid}"
            )
        if value.shape != ours[key].shape:
            raise RecipeError(
                f"init.from: {path} has {key} of shape {_text(value)}, where {name} has "
                f"{_text(ours[key])}; {valid}"
            )
    for key in ours:
        optional = key in fresh_head or key.endswith("num_batches_tracked")  # which old files lack
        if key not in theirs and not optional and not key.startswith(tuple(f"{b}." for b in new)):
            raise RecipeError(f"init.from: {path} has no {key}, which {name} needs; {valid}")
    with torch.no_grad():
        for key, value in theirs.items():
            ours[key].copy_(value)  # which shares the model's memory
    for block, norm in new.items():
        _make_identity(model, block, norm)
    told = f"weights from {path}: {len(theirs)} tensors copied"
    if new:
        told += f", {len(new)} new block{'s start' if len(new) > 1 else ' starts'} as identity"
    return Start(told + (", classifier fresh" if fresh_head else ""), found)


def _new_blocks(model: nn.Module, theirs: dict[str, Tensor]) -> dict[str, nn.Module]:
    """The residual blocks that a shallower model has not got, with their last norm layers.

    The first block of a stage, which changes the shape, is not among them: it must be in the file.
    """
    blocks = residual_blocks(model)
    found = {}
    for block, norm in blocks.items():
        absent = not any(key.startswith(f"{block}.") for key in theirs)
        if absent and _before(block) in blocks and model.get_submodule(block).downsample is None:
            found[block] = norm
    return found


def _make_identity(model: nn.Module, block: str, norm: nn.Module) -> None:
    """Have a new block give out what it takes in, and see that it does.

    Raises:
        RecipeError: it does not, as its activation changes what it has put out already.
    """
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
            "changes what has passed it already; valid: a model whose blocks end in a ReLU"
        )


def _before(block: str) -> str:
    """The name of the block before one in its stage; none such for the first."""
    stage, _, index = block.rpartition(".")
    return f"{stage}.{int(index) - 1}" if index.isdigit() else ""


def _classifier(model: nn.Module, state: dict[str, Tensor]) -> set[str]:
    """The tensors of the layer whose outputs are the classes."""
    names = getattr(model, "pretrained_cfg", {}).get("classifier") or ()  # as timm says
    names = (names,) if isinstance(names, str) else names
    if not names:
        names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1:]
    return {key for key in state if key.rpartition(".")[0] in names}


def _text(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "a single number"
