"""Weights in files: what a run exports, and what a run may start from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import RecipeError
from . import checkpoint

#: In a run's folder, at the end: its weights, and their moving average if there is one.
WEIGHTS, WEIGHTS_EMA = "weights.pt", "weights_ema.pt"

_VALID = (
    "valid: a checkpoint file of timm (.pth, .safetensors), a weights.pt, or the folder of a run "
    "or of one of its checkpoints"
)


def write_weights(path: Path, content: dict[str, Tensor]) -> None:
    """Write a state dict; a crash leaves the file whole or not there."""
    partial = path.with_name(f".{path.name}.partial")
    torch.save(content, partial)
    partial.rename(path)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict that a file or folder holds, on the CPU.

    Files are read by timm: of a training checkpoint the EMA if it has one, without the prefixes
    that DataParallel and torch.compile leave; only weights are unpickled. A run's folder gives its
    ``weights.pt``, or else its newest checkpoint; a checkpoint gives FP32 masters where it has
    them, and buffers averaged over the ranks.

    Raises:
        RecipeError: there is nothing of this kind at ``path``, or it is damaged.
    """
    if path.is_dir():
        if (path / WEIGHTS).is_file():
            return read_weights(path / WEIGHTS)
        whole = checkpoint.is_whole(path)
        newest = path if whole else checkpoint.latest(path / checkpoint.CHECKPOINTS)
        if newest is None:
            raise RecipeError(f"init.from: the folder {path} holds no weights; {_VALID}")
        return _of_checkpoint(newest)
    if not path.is_file():
        raise RecipeError(f"init.from: no file or folder {path}; {_VALID}")
    from timm.models import load_state_dict

    try:
        content: dict[Any, Any] = load_state_dict(str(path), device="cpu", weights_only=True)
    except Exception as error:  # of any kind: pickle, zip, safetensors and timm raise their own
        told = f"{type(error).__name__}: {error}".splitlines()[0].partition(". ")[0]
        raise RecipeError(
            f"init.from: {path} cannot be read as weights: {told}; {_VALID}"
        ) from None
    for key, value in content.items():
        if not (isinstance(value, Tensor) and value.layout is torch.strided):
            raise RecipeError(
                f"init.from: {path} is not a model's state dict: its {key!r} is a "
                f"{type(value).__name__}, not a dense tensor; {_VALID}"
            )
    return content


def digest(weights: dict[str, Tensor]) -> str:
    """A hash of names, shapes, dtypes and values, in any order of names."""
    content = hashlib.sha256()
    for name, value in sorted(weights.items()):
        content.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        content.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()


def _of_checkpoint(path: Path) -> dict[str, Tensor]:
    """The weights of one of our own checkpoints, written by :class:`checkpoint.Checkpoints`."""
    try:
        metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        stored = {
            key: torch.empty(about.size, dtype=about.properties.dtype)
            for key, about in metadata.items()
            if isinstance(about, TensorStorageMetadata)
            and (key.startswith(("model.", "buffers.")) or key.endswith(".master"))
        }
        checkpoint.quietly(dcp.load, stored, checkpoint_id=path)
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        told = str(error).partition("\n")[0]
        raise RecipeError(
            f"init.from: {path} is damaged: {type(error).__name__}: {told}; {_VALID}"
        ) from None
    weights = {}
    for key in stored:
        section, _, name = key.partition(".")
        if section == "model":
            weights[name] = stored.get(f"optimizer.state.{name}.master", stored[key])
        elif section == "buffers":
            name = name.partition(".")[2]  # after the rank
            values = [v for k, v in stored.items() if _is_buffer(k, name)]
            floating = values[0].is_floating_point()
            weights[name] = torch.stack(values).mean(0) if floating else values[0]
    return weights


def _is_buffer(key: str, name: str) -> bool:
    section, _, rest = key.partition(".")
    return section == "buffers" and rest.partition(".")[2] == name
