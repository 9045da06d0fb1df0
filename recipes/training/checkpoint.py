"""Checkpoints: written to a temporary folder, renamed when complete, and read back bit for bit.

torch.distributed.checkpoint stores the tensors; ``state.json`` holds the rest of a run's state, and
the SHA-256 of each file. With several machines, the run folder must be on storage that all of them
share.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
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
from . import plain_data
from .checkpoint_files import (
    DIGEST,
    FILES,
    STATE,
    DamagedError,
    facts_of,
    flush_folder,
    unreadable,
    verify,
    write_state,
)
from .ema import WeightAverage
from .run_files import CHECKPOINTS as CHECKPOINTS

_KEYS = ("step", "world_size", "loader", "precision", "recipe")


class NotWrittenError(RuntimeError):
    """Raised on all ranks where a checkpoint cannot be written; the message says why."""


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: Holds one folder ``step-<number>`` for each checkpoint.
        job: The ranks; all of them must make every call below.
        keep: Number of newest checkpoints to keep.
    """

    def __init__(self, folder: Path, job: Job, *, keep: int = 2) -> None:
        self.folder = folder
        self._job = job
        self._keep = keep

    def set_aside_after(self, step: int) -> None:
        """Set the checkpoints after a step aside, until a new one is written; on rank 0 alone.

        A run that goes back to a step makes them again. What a crash left unfinished is removed.
        """
        for path in self.folder.glob(".step-*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        for path in _numbered(self.folder.glob("step-*")):
            if _step(path) > step:
                aside = path.with_name(f".{path.name}.old")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        state: dict[str, Any],
        ema: WeightAverage | None = None,
        best: int | None = None,
    ) -> Path:
        """Write a checkpoint; a crash at any time leaves a complete one or none.

        Args:
            step: Number of steps made.
            model: The model without its DDP wrapper. Buffers are stored for each rank.
            optimizer: Optimizer of the model's parameters.
            state: ``loader``, ``precision`` and ``recipe``; must be serializable as JSON.
            ema: Moving average of the model's weights, if there is one.
            best: Step of a checkpoint that is kept besides the newest.

        Returns:
            The checkpoint's folder.

        Raises:
            NotWrittenError: There is no room, or the folder cannot be written; raised on all ranks.
                Nothing is left of it, and older checkpoints are as they were.
            AgreedError: The optimizer's state holds objects that a checkpoint cannot hold.
        """
        path = self.folder / f"step-{step:08d}"
        partial = self.folder / f".{path.name}.partial"
        tensors = _tensors(model, optimizer, [self._job.rank], ema)
        try:
            plain_data.check_plain(_without_tensors(tensors))
        except plain_data.NotPlainError as kind:
            raise AgreedError(
                f"optimizer.name: the optimizer keeps a {kind} in its state, which a checkpoint "
                "does not hold; valid: an optimizer of tensors, numbers, strings and lists"
            ) from None
        content = {"step": step, "world_size": self._job.world_size, **state}
        if ema:
            content["ema_updates"] = ema.updates
        try:
            self._write(partial, tensors, content)
            with self._agreed():
                if self._job.is_main:
                    self._put_in_place(partial, path)
        except NotWrittenError as error:
            if self._job.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise NotWrittenError(f"{error}{self._room(tensors)}") from None
        if self._job.is_main:
            self._remove_others(step, best)
        return path

    def _put_in_place(self, partial: Path, path: Path) -> None:
        if path.exists():
            aside = path.with_name(f".{path.name}.old")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        partial.rename(path)
        with suppress(OSError):  # it is written, though a loss of power may lose it
            flush_folder(self.folder)

    def _write(self, partial: Path, tensors: dict[str, Any], content: dict[str, Any]) -> None:
        with self._agreed():
            if self._job.is_main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        try:
            quietly(dcp.save, tensors, checkpoint_id=partial)
        except CheckpointException as error:  # which is not a subclass of Exception
            reason = plain_data.reason(error)
            if not plain_data.is_of_storage(error):
                raise RuntimeError(f"checkpoint {partial.parent}: {reason}") from error
            raise NotWrittenError(f"{partial.parent}: {reason}") from error
        own: dict[str, dict[str, Any]] = {}
        with self._agreed():
            # Each rank reads its own files, which are in its machine's memory still.
            own = facts_of(partial.glob(f"__{self._job.rank}_*"))
        files = {name: facts for part in self._job.gather(own) for name, facts in part.items()}
        with self._agreed():
            if self._job.is_main:
                write_state(partial, content, files | facts_of([partial / ".metadata"]))

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """Context manager that raises NotWrittenError on all ranks for an OSError of one.

        Any other error is raised on its own rank, and as a RuntimeError on the others.
        """
        problem, unexpected = "", None
        try:
            yield
        except OSError as error:
            problem = f"{error.filename or self.folder}: {error.strerror}"
        except Exception as error:
            unexpected = error
        everyone = self._job.gather((problem, repr(unexpected) if unexpected else ""))
        if unexpected:
            raise unexpected
        for _, other in everyone:
            if other:
                raise RuntimeError(f"another rank failed to write a checkpoint: {other}")
        for found, _ in everyone:
            if found:
                raise NotWrittenError(found)

    def _room(self, tensors: dict[str, Any]) -> str:
        """What a checkpoint takes and what is free, in words, where that is known."""
        needed = sum(t.numel() * t.element_size() for t in _leaves(tensors)) / 1e6
        try:
            free = shutil.disk_usage(self.folder).free / 1e6
        except OSError:
            return f" (about {needed:,.1f} MB are needed)"
        return f" (about {needed:,.1f} MB are needed, {free:,.1f} MB are free)"

    def _remove_others(self, step: int, best: int | None) -> None:
        """Remove all but the newest checkpoints up to a step, and those that were set aside."""
        found = [path for path in _numbered(self.folder.glob("step-*")) if _step(path) <= step]
        left = [path for path in found[: -self._keep] if _step(path) != best]
        for path in (*left, *self.folder.glob(".step-*.old")):
            shutil.rmtree(path, ignore_errors=True)  # tried again after the next one


def latest(folder: Path, *, before: float = math.inf) -> Path | None:
    """Return the newest complete checkpoint in a folder, of fewer than ``before`` steps."""
    found = [path for path in _complete(folder) if _step(path) < before]
    return found[-1] if found else None


def newest_intact(folder: Path) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Return the newest checkpoint in a folder whose files are as they were written.

    Returns:
        The checkpoint, None if there is none; its state; a line for each newer one, damaged.

    Raises:
        RecipeError: There are checkpoints, and all are damaged, or one cannot be read now.
    """
    damaged: list[str] = []
    for path in reversed(_numbered(folder.glob("step-*"))):
        try:
            if STATE not in os.listdir(path):  # though it got its name when it was complete
                raise DamagedError(f"{path} is damaged: it has no {STATE}")
            state = read_state(path)
        except DamagedError as error:
            damaged.append(str(error).removeprefix("resume.from: ").partition("; valid: ")[0])
        except OSError as error:
            raise unreadable(path, error) from error
        else:
            return path, state, [f"{line}: resuming from {path.name} instead" for line in damaged]
    if damaged:
        raise RecipeError(
            f"resume.from: no checkpoint in {folder} can be used: {'; '.join(damaged)}; valid: "
            "another checkpoint, resume=PATH, or another run_dir"
        )
    return None, {}, []


def read_state(path: Path) -> dict[str, Any]:
    """Read the ``state`` passed to :meth:`Checkpoints.save`, with ``step`` and ``world_size``.

    Raises:
        DamagedError: A file is not as it was written.
        RecipeError: ``path`` is not a checkpoint, or cannot be read.
    """
    try:
        content: Any = json.loads((path / STATE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise RecipeError(
            f"resume.from: {path} is not a checkpoint; valid: a folder checkpoints/step-<number> "
            "of a run, or resume=true for the newest one in run_dir"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError:
        content = None
    if not isinstance(content, dict) or not content.keys() >= set(_KEYS):
        raise DamagedError(
            f"resume.from: {path} is damaged: its {STATE} is not an object with the keys "
            f"{', '.join(_KEYS)}; valid: another checkpoint, resume=PATH"
        )
    verify(path, content)
    return {key: value for key, value in content.items() if key not in (FILES, DIGEST)}


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a complete checkpoint."""
    return (path / STATE).is_file()


def load(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    job: Job,
    ema: WeightAverage | None = None,
) -> None:
    """Load a checkpoint's tensors into ``model``, ``optimizer`` and ``ema``.

    Each rank gets its own buffers back, or their mean over ranks if the number of ranks has
    changed. If the checkpoint has no moving average, ``ema`` restarts from the loaded weights.

    Args:
        path: The checkpoint's folder.
        model: The model without its DDP wrapper.
        optimizer: Optimizer of the model's parameters.
        job: The ranks.
        ema: Moving average of the model's weights, if there is one.

    Raises:
        AgreedError: a file of the checkpoint is missing or damaged; raised on all ranks.
    """
    tensors: dict[str, Any] = {}
    with job.raise_on_all_ranks():
        state = read_state(path)
        saved, updates = state["world_size"], state.get("ema_updates")
        ranks = [job.rank] if saved == job.world_size else list(range(saved))
        tensors = _tensors(model, optimizer, ranks, None if updates is None else ema)
        try:
            quietly(plain_data.load, tensors, path)
        except (CheckpointException, plain_data.NotPlainError) as error:
            raise RecipeError(
                f"resume.from: {path} is damaged: {plain_data.reason(error)}; valid: another "
                "checkpoint, resume=PATH"
            ) from error
    # Options of the parameter groups stay those of the recipe, which may have changed since.
    names = optimizer.defaults
    options = [{k: v for k, v in g.items() if k in names} for g in optimizer.param_groups]
    set_optimizer_state_dict(model, optimizer, tensors["optimizer"])
    for group, now in zip(optimizer.param_groups, options, strict=True):
        group.update(now)
        group.pop("initial_lr", None)  # of which the scheduler keeps the ratio between groups
    _fill(dict(model.named_buffers()), tensors["buffers"], ranks)
    if ema and updates is not None:
        ema.updates = updates
        _fill(ema.buffers, tensors["ema"]["buffers"], ranks)
    elif ema:
        ema.restart()


@torch.no_grad()
def _fill(
    buffers: dict[str, Tensor], saved: dict[str, dict[str, Tensor]], ranks: list[int]
) -> None:
    """Set buffers to the saved ones of a single rank, or to the mean of several ranks."""
    for name, buffer in buffers.items():
        values = [saved[str(rank)][name] for rank in ranks]
        if buffer.is_floating_point():
            values[0] = torch.stack(values).mean(0) if len(values) > 1 else values[0]
        buffer.copy_(values[0])


def _tensors(
    model: nn.Module, optimizer: Optimizer, ranks: list[int], ema: WeightAverage | None
) -> dict[str, Any]:
    def of_ranks(buffers: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        return {str(rank): {n: b.detach().clone() for n, b in buffers.items()} for rank in ranks}

    content = {
        "model": {name: p.detach() for name, p in model.named_parameters()},
        "optimizer": quietly(get_optimizer_state_dict, model, optimizer),
        "buffers": of_ranks(dict(model.named_buffers())),
    }
    for group in content["optimizer"]["param_groups"]:
        if isinstance(group.get("lr"), Tensor):  # for CUDA graphs
            group["lr"] = float(group["lr"])
    if ema:
        content["ema"] = {"parameters": ema.parameters, "buffers": of_ranks(ema.buffers)}
    return content


def _without_tensors(content: Any) -> Any:
    """Nested dictionaries and lists without the tensors in them."""
    if isinstance(content, dict):
        return {k: _without_tensors(v) for k, v in content.items() if not isinstance(v, Tensor)}
    if isinstance(content, list):
        return [_without_tensors(v) for v in content if not isinstance(v, Tensor)]
    return content


def _leaves(content: Any) -> Iterator[Tensor]:
    """The tensors in nested dictionaries and lists."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        yield from chain.from_iterable(map(_leaves, content.values()))
    elif isinstance(content, list | tuple):
        yield from chain.from_iterable(map(_leaves, content))


def _complete(folder: Path) -> list[Path]:
    return _numbered(path.parent for path in folder.glob(f"step-*/{STATE}"))


def _numbered(paths: Iterable[Path]) -> list[Path]:
    """Those that have the name of a checkpoint, by step."""
    return sorted((path for path in paths if path.name[5:].isdigit()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` without torch.distributed.checkpoint's warnings, as on a single process."""
    disabled = logging.root.manager.disable
    logging.disable(
        logging.WARNING
    )  # it logs tracebacks to the root logger, though it raises them too
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
            return function(*args, **kwargs)
    finally:
        logging.disable(disabled)
