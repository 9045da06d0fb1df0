"""Files of weights: those that a run exports, and those that a run may start from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import RecipeError
from ...schema.names import RECIPE
from . import checkpoint
from .checkpoint import CheckpointError, mean_over_ranks, read_parts
from .names import CHECKPOINTS, CLASSES, STATE, SUMMARY, WEIGHTS, WEIGHTS_EMA
from .tensor_files import damage_of, write_tensors

#: Folder in a run's folder for the results of a run that had finished there, and then went on.
PREVIOUS = "previous"

_VALID = (
    "valid: a checkpoint file of timm (.pth, .safetensors), a weights.pt, or the folder of a run "
    "or of one of its checkpoints"
)


def write_weights(path: Path, content: dict[str, Tensor]) -> None:
    """Write a state dict, contiguous whatever the memory format of training."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_tensors(partial, {name: value.contiguous() for name, value in content.items()})
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)
        raise
    partial.rename(path)


def set_results_aside(run_dir: Path) -> None:
    """Move the results of a run that goes on, and their recipe, into :data:`PREVIOUS`."""
    names = (WEIGHTS, WEIGHTS_EMA, SUMMARY, CLASSES)  # the weights first, in case of a crash
    found, previous = [name for name in names if (run_dir / name).is_file()], run_dir / PREVIOUS
    if WEIGHTS in found:
        shutil.rmtree(previous, ignore_errors=True)
    if found:
        previous.mkdir(exist_ok=True)
        if (run_dir / RECIPE).is_file():
            shutil.copyfile(run_dir / RECIPE, previous / RECIPE)
    for name in found:
        (run_dir / name).replace(previous / name)


def source_of(
    path: Path, *, ema: bool = False, key: str = "init.from"
) -> tuple[Path, tuple[str, ...]]:
    """Return a file or intact checkpoint to read, and a line for each newer damaged one."""
    if not path.is_dir():
        if not path.is_file():
            raise RecipeError(f"{key}: no file or folder {path}; {_VALID}")
        return path, ()
    if (path / WEIGHTS).is_file():
        average = path / WEIGHTS_EMA
        if ema and not average.is_file():
            raise _no_average(path, key)
        return average if ema else path / WEIGHTS, ()
    try:
        if (path / STATE).is_file():
            checkpoint.read_state(path)
            return path, ()
        newest, _, damaged = checkpoint.newest_intact(path / CHECKPOINTS)
    except CheckpointError as error:
        raise RecipeError(f"{key}: {error.problem}; {_VALID}") from None
    if newest is None:
        raise RecipeError(f"{key}: the folder {path} holds no weights; {_VALID}")
    return newest, tuple(f"{problem}: reading {newest.name} instead" for problem in damaged)


def _no_average(path: Path, key: str) -> RecipeError:
    return RecipeError(
        f"{key}: {path} holds no moving average of the weights; valid: without it, or a run with "
        "ema.decay"
    )


def read_weights(path: Path, *, ema: bool = False, key: str = "init.from") -> dict[str, Tensor]:
    """Read the state dict in a file or folder, onto the CPU."""
    path, _ = source_of(path, ema=ema, key=key)
    if path.is_dir():
        return _of_checkpoint(path, ema, key)
    if problem := damage_of(path):
        raise RecipeError(f"{key}: {path} is damaged: {problem}; {_VALID}")
    from timm.models import load_state_dict

    try:
        content: dict[Any, Any] = load_state_dict(str(path), device="cpu", weights_only=True)
    except Exception as error:  # pickle, zip, safetensors and timm raise errors of their own
        reason = f"{type(error).__name__}: {error}".splitlines()[0].partition(". ")[0]
        raise RecipeError(f"{key}: {path} cannot be read as weights: {reason}; {_VALID}") from None
    for name, value in content.items():
        if not (isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta):
            raise RecipeError(
                f"{key}: {path} is not a model's state dict: its {name!r} is a "
                f"{type(value).__name__}, not a dense tensor; {_VALID}"
            )
    return content


def _of_checkpoint(path: Path, ema: bool, key: str) -> dict[str, Tensor]:
    """Read the weights of a checkpoint that :mod:`.saving` wrote."""
    try:
        saved = checkpoint.read_state(path)["world_size"]
        common, *of_ranks = read_parts(path, range(saved))
    except CheckpointError as error:
        raise RecipeError(f"{key}: {error.problem}; {_VALID}") from None
    state = common["optimizer"]["state"]
    weights = {
        name: state.get(name, {}).get("master", value)
        for name, value in common["parameters"].items()
    }
    weights |= mean_over_ranks([one["buffers"] for one in of_ranks])
    if ema:
        if "ema" not in common:
            raise _no_average(path, key)
        weights |= common["ema"]
        weights |= mean_over_ranks([one["ema_buffers"] for one in of_ranks])
    return weights
