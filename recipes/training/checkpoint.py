"""Checkpoints: written beside their place and moved there whole, read back bit for bit.

The tensors are stored by torch.distributed.checkpoint, what else a run needs is in ``state.json``.
With several machines, the run folder must be on storage that all of them see.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import warnings
from pathlib import Path
from traceback import format_exception_only
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from ..errors import AgreedError, RecipeError
from ..ranks import Job
from .ema import WeightAverage

#: The folder of checkpoints in a run's folder.
CHECKPOINTS = "checkpoints"

_STATE = "state.json"
_KEYS = ("step", "world_size", "loader", "precision", "recipe")


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: holds ``step-<number>`` folders.
        job: the ranks; all of them must make every call below.
        keep: how many of the newest are kept.
    """

    def __init__(self, folder: Path, job: Job, *, keep: int = 2) -> None:
        self.folder = folder
        self._job = job
        self._keep = keep

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        state: dict[str, Any],
        average: WeightAverage | None = None,
    ) -> Path:
        """Write a checkpoint; a crash at any time leaves it whole or not there.

        Args:
            step: updates made.
            model: without DDP around it. Buffers are stored for each rank.
            optimizer: of the model's parameters.
            state: ``loader``, ``precision`` and ``recipe``, as JSON can hold them.
            average: of the model's weights, if one is taken.
        """
        path = self.folder / f"step-{step:08d}"
        if (path / _STATE).exists():
            return path
        partial = self.folder / f".{path.name}.partial"
        if self._job.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._meet()
        tensors = _tensors(model, optimizer, [self._job.rank], average)
        try:
            quietly(dcp.save, tensors, checkpoint_id=partial)
        except CheckpointException as error:  # not an Exception, which callers look for
            raise RuntimeError(f"checkpoint {path}: {error}") from error
        if self._job.is_main:
            content = {"step": step, "world_size": self._job.world_size, **state}
            if average:
                content["ema_updates"] = average.updates
            (partial / _STATE).write_text(json.dumps(content, indent=2))
            shutil.rmtree(path, ignore_errors=True)  # what is left of one that was being removed
            partial.rename(path)
            for old in _complete(self.folder)[: -self._keep]:
                shutil.rmtree(old)
        self._meet()
        return path

    def _meet(self) -> None:
        if self._job.world_size > 1:
            dist.barrier()


def latest(folder: Path, *, before: float = math.inf) -> Path | None:
    """The newest whole checkpoint below a run's checkpoint folder, of fewer than ``before`` steps
    if that is given."""
    found = [path for path in _complete(folder) if int(path.name.split("-")[1]) < before]
    return found[-1] if found else None


def read_state(path: Path) -> dict[str, Any]:
    """What was given to :meth:`Checkpoints.save` as ``state``, with ``step`` and ``world_size``.

    Raises:
        RecipeError: ``path`` is not a checkpoint, or a damaged one.
    """
    try:
        content: Any = json.loads((path / _STATE).read_text())
    except OSError:
        raise RecipeError(
            f"resume.from: {path} is not a checkpoint (a folder step-<number> of a run's "
            "checkpoints); true takes the newest of run_dir"
        ) from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or not content.keys() >= set(_KEYS):
        raise RecipeError(
            f"resume.from: {path} is damaged: its {_STATE} is not an object with the keys "
            f"{', '.join(_KEYS)}; resume=PATH takes another checkpoint"
        )
    return content


def is_whole(path: Path) -> bool:
    """Whether a folder is a checkpoint."""
    return (path / _STATE).is_file()


def load(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    job: Job,
    average: WeightAverage | None = None,
) -> None:
    """Read a checkpoint's tensors into ``model`` (without DDP around it), ``optimizer`` and the
    ``average`` of the weights, if one is taken; of a checkpoint without one, it starts anew there.

    Each rank gets its own buffers back; where the number of ranks has changed, their average.

    Raises:
        RecipeError: a file of the checkpoint is missing or damaged; raised on all ranks.
    """
    state = read_state(path)
    saved, updates = state["world_size"], state.get("ema_updates")
    ranks = [job.rank] if saved == job.world_size else list(range(saved))
    tensors = _tensors(model, optimizer, ranks, None if updates is None else average)
    try:
        quietly(dcp.load, tensors, checkpoint_id=path)
    except CheckpointException as error:  # which gathers what went wrong on any rank
        cause = next(iter(error.failures.values()))[0]
        told = format_exception_only(cause)[0].splitlines()[0]
        raise AgreedError(
            f"resume.from: {path} is damaged: {told}; resume=PATH takes another checkpoint"
        ) from error
    # Options of the groups are the recipe's, which may have changed since; the rest is state.
    names = optimizer.defaults
    options = [{k: v for k, v in g.items() if k in names} for g in optimizer.param_groups]
    set_optimizer_state_dict(model, optimizer, tensors["optimizer"])
    for group, now in zip(optimizer.param_groups, options, strict=True):
        group.update(now)
    _fill(dict(model.named_buffers()), tensors["buffers"], ranks)
    if average and updates is not None:
        average.updates = updates
        _fill(average.buffers, tensors["ema"]["buffers"], ranks)
    elif average:
        average.restart()


@torch.no_grad()
def _fill(
    buffers: dict[str, Tensor], saved: dict[str, dict[str, Tensor]], ranks: list[int]
) -> None:
    """Set buffers to those saved of one rank, or to the average of several."""
    for name, buffer in buffers.items():
        values = [saved[str(rank)][name] for rank in ranks]
        if buffer.is_floating_point():
            values[0] = torch.stack(values).mean(0) if len(values) > 1 else values[0]
        buffer.copy_(values[0])


def _tensors(
    model: nn.Module, optimizer: Optimizer, ranks: list[int], average: WeightAverage | None
) -> dict[str, Any]:
    def of_ranks(buffers: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        return {str(rank): {n: b.detach().clone() for n, b in buffers.items()} for rank in ranks}

    content = {
        "model": {name: p.detach() for name, p in model.named_parameters()},
        "optimizer": quietly(get_optimizer_state_dict, model, optimizer),
        "buffers": of_ranks(dict(model.named_buffers())),
    }
    if average:
        content["ema"] = {"parameters": average.parameters, "buffers": of_ranks(average.buffers)}
    return content


def _complete(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"step-*/{_STATE}"))


def quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call without what torch.distributed.checkpoint warns of, such as running on one process."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it logs to the root, with tracebacks that its errors tell
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
            return function(*args, **kwargs)
    finally:
        logging.disable(disabled)
