"""Checkpoints: written to a temporary folder, renamed when complete, and read back bit for bit.

Training is data-parallel, so all ranks hold the same parameters and optimizer state: rank 0 writes
them to ``model.pt``, by the parameters' names. Buffers differ, such as the running statistics of
batch norm, and each rank writes its own to ``rank-<number>.pt``. ``state.json`` holds the rest of a
run's state, and the SHA-256 of each file. With several machines, the run folder must be on storage
that all of them share.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import AgreedError
from ...files import DamagedFileError, read_object
from ...launcher import is_first_of_machine
from ...ranks import Job
from ..ema import WeightAverage
from .checkpoint_files import (
    DIGEST,
    FILES,
    MODEL,
    MOST_BYTES,
    STATE,
    VALID,
    CheckpointError,
    DamagedError,
    facts_of,
    flush_folder,
    mean_over_ranks,
    of_rank,
    read_parts,
    unreadable,
    verify,
    write_state,
)
from .names import CHECKPOINTS as CHECKPOINTS
from .tensor_files import NotPlainError, check_plain, tensors_in, write_tensors

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
        tensors = {of_rank(self._job.rank): _buffers(model, ema)}
        common = _common(model, optimizer, ema)
        try:
            check_plain(common["optimizer"])
        except NotPlainError as kind:
            raise AgreedError(
                f"optimizer.name: the optimizer keeps a {kind} in its state, which a checkpoint "
                "does not hold; valid: an optimizer of tensors, numbers, strings and lists"
            ) from None
        if self._job.is_main:
            tensors[MODEL] = common
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
            raise NotWrittenError(f"{error}{self._room(common)}") from None
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
        own: dict[str, dict[str, Any]] = {}
        with self._agreed():
            for name, part in tensors.items():
                write_tensors(partial / name, part)
            # Each rank reads its own files, which are in its machine's memory still.
            own = facts_of(partial / name for name in tensors)
        files = {name: facts for part in self._job.gather(own) for name, facts in part.items()}
        with self._agreed():
            if self._job.is_main:
                write_state(partial, content, files)

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
        needed = sum(t.numel() * t.element_size() for t in tensors_in(tensors)) / 1e6
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
        The checkpoint, None if there is none; its state; what is wrong with each newer one.

    Raises:
        CheckpointError: There are checkpoints, and all are damaged, or one cannot be read now.
    """
    damaged: list[str] = []
    for path in reversed(_numbered(folder.glob("step-*"))):
        try:
            if STATE not in os.listdir(path):  # though it got its name when it was complete
                raise DamagedError(path, f"it has no {STATE}")
            state = read_state(path)
        except DamagedError as error:
            damaged.append(error.problem)
        except OSError as error:
            raise unreadable(path, error) from error
        else:
            return path, state, damaged
    if damaged:
        problem = f"no checkpoint in {folder} can be used: {'; '.join(damaged)}"
        raise CheckpointError(problem, f"{VALID}, or another run_dir")
    return None, {}, []


def read_state(path: Path, *, verified: bool = False) -> dict[str, Any]:
    """Read the ``state`` passed to :meth:`Checkpoints.save`, with ``step`` and ``world_size``.

    Args:
        path: The checkpoint's folder.
        verified: Whether another process of this machine compares its files with their SHA-256.

    Raises:
        DamagedError: A file is not as it was written.
        CheckpointError: ``path`` is not a checkpoint, or cannot be read.
    """
    try:
        content = read_object(path / STATE, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{path} is not a checkpoint",
            "a folder checkpoints/step-<number> of a run, or resume=true for the newest one in "
            "run_dir",
        ) from None
    except OSError as error:
        raise unreadable(path, error) from error
    except DamagedFileError:
        content = {}
    if not content.keys() >= set(_KEYS):
        raise DamagedError(path, f"its {STATE} is not an object with the keys {', '.join(_KEYS)}")
    verify(path, content, files_too=not verified)
    if MODEL not in content[FILES]:
        problem = "was written by an earlier version of largebatch, whose checkpoints are no longer"
        raise CheckpointError(f"{path} {problem} read", f"{VALID}, or that version")
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
    common: dict[str, Any] = {}
    buffers: list[dict[str, Any]] = []
    with job.raise_on_all_ranks():
        state = read_state(path, verified=not is_first_of_machine())
        saved, updates = state["world_size"], state.get("ema_updates")
        ranks = [job.rank] if saved == job.world_size else list(range(saved))
        common, *buffers = read_parts(path, ranks)
        if problem := _difference(model, {**common["parameters"], **buffers[0]["buffers"]}):
            raise CheckpointError(f"{path} is of another model: {problem}")
        if _names(model, optimizer) != _names_in(common["optimizer"]):
            raise CheckpointError(f"{path} has other parameter groups")
    _fill(dict(model.named_parameters()), common["parameters"])
    # Options of the parameter groups stay those of the recipe, which may have changed since.
    names = optimizer.defaults
    options = [{k: v for k, v in g.items() if k in names} for g in optimizer.param_groups]
    optimizer.load_state_dict(_by_index(common["optimizer"]))
    for group, now in zip(optimizer.param_groups, options, strict=True):
        group.update(now)
        group.pop("initial_lr", None)  # of which the scheduler keeps the ratio between groups
    _fill(dict(model.named_buffers()), mean_over_ranks([one["buffers"] for one in buffers]))
    if ema and updates is not None:
        ema.updates = updates
        _fill(ema.parameters, common["ema"])
        _fill(ema.buffers, mean_over_ranks([one["ema_buffers"] for one in buffers]))
    elif ema:
        ema.restart()


@torch.no_grad()
def _fill(tensors: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def _difference(model: nn.Module, saved: dict[str, Tensor]) -> str:
    """The first difference in names or shapes, in words; nothing if there is none."""
    ours = {n: [*t.shape] for n, t in chain(model.named_parameters(), model.named_buffers())}
    theirs = {name: [*tensor.shape] for name, tensor in saved.items()}
    for name in sorted(ours | theirs):
        if ours.get(name) != theirs.get(name):
            there, here = (of.get(name, "missing") for of in (theirs, ours))
            return f"the shape of {name} is {there} there, and {here} here"
    return ""


def _common(model: nn.Module, optimizer: Optimizer, ema: WeightAverage | None) -> dict[str, Any]:
    """What all ranks have in common; the optimizer's state by the parameters' names."""
    saved = optimizer.state_dict()
    names = _names(model, optimizer)
    groups = [{**group} for group in saved["param_groups"]]
    for group in groups:
        group["params"] = [names[index] for index in group["params"]]
        if isinstance(group.get("lr"), Tensor):  # for CUDA graphs
            group["lr"] = float(group["lr"])
    of_optimizer = {
        "state": {names[index]: value for index, value in saved["state"].items()},
        "param_groups": groups,
    }
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    content = {"parameters": parameters, "optimizer": of_optimizer}
    return content | ({"ema": ema.parameters} if ema else {})


def _buffers(model: nn.Module, ema: WeightAverage | None) -> dict[str, Any]:
    """What each rank has of its own."""
    content = {"buffers": dict(model.named_buffers())}
    return content | ({"ema_buffers": ema.buffers} if ema else {})


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in the order of its state dict's numbers."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


def _names_in(saved: dict[str, Any]) -> list[str]:
    return [name for group in saved["param_groups"] for name in group["params"]]


def _by_index(saved: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's saved state as its ``load_state_dict`` takes it, copied from the file."""
    index = {name: number for number, name in enumerate(_names_in(saved))}
    groups = [
        {**group, "params": [index[name] for name in group["params"]]}
        for group in saved["param_groups"]
    ]
    state = {index[name]: deepcopy(value) for name, value in saved["state"].items()}
    return {"state": state, "param_groups": groups}


def _complete(folder: Path) -> list[Path]:
    return _numbered(path.parent for path in folder.glob(f"step-*/{STATE}"))


def _numbered(paths: Iterable[Path]) -> list[Path]:
    """Those that have the name of a checkpoint, by step."""
    return sorted((path for path in paths if path.name[5:].isdecimal()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
