"""Checkpoints, read back bit for bit; :mod:`.saving` writes them.

Training is data-parallel, so all ranks hold the same parameters and optimizer state: they are in
``model.pt``, by the parameters' names. Buffers differ, such as the running statistics of batch
norm, and each rank has its own in ``rank-<number>.pt``. ``state.json`` holds the rest of a run's
state, and the SHA-256 of these files and of its own content.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import RecipeError
from ...files import DamagedFileError, read_object
from ...launcher import is_first_of_machine
from ...ranks import Job
from ..evaluate import WeightAverage
from .names import STATE
from .tensor_files import read_tensors

#: What all ranks have in common: ``parameters``, ``optimizer``, and ``ema`` if there is an average.
MODEL = "model.pt"
FILES, DIGEST = "files", "sha256"
_KEYS = ("step", "world_size", "loader", "precision", "recipe")
_VALID = "another checkpoint, resume=PATH"
#: The files that this process found as they were written, with the time of their last change.
_verified: set[tuple[Path, int]] = set()


class CheckpointError(RecipeError):
    """Raised for a checkpoint that cannot be used."""

    def __init__(self, problem: str, valid: str = _VALID) -> None:
        super().__init__(f"resume.from: {problem}; valid: {valid}")
        self.problem = problem


class DamagedError(CheckpointError):
    """Raised for a checkpoint whose files are not as they were written."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} is damaged: {problem}")


def latest(folder: Path, *, before: float = math.inf) -> Path | None:
    """Return the newest complete checkpoint in a folder, of fewer than ``before`` steps."""
    complete = numbered(path.parent for path in folder.glob(f"step-*/{STATE}"))
    return next((path for path in reversed(complete) if step_of(path) < before), None)


def newest_intact(folder: Path) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Return the newest intact checkpoint, its state, and what is wrong with each newer one."""
    damaged: list[str] = []
    for path in reversed(numbered(folder.glob("step-*"))):
        try:
            state = read_state(path)
        except DamagedError as error:
            damaged.append(error.problem)
        else:
            return path, state, damaged
    if damaged:
        problem = f"no checkpoint in {folder} can be used: {'; '.join(damaged)}"
        raise CheckpointError(problem, f"{_VALID}, or another run_dir")
    return None, {}, []


def read_state(path: Path, *, verified: bool = False) -> dict[str, Any]:
    """Read the state of a checkpoint whose files are verified, but where that is done already."""
    content: dict[str, Any] = {}
    try:
        with suppress(DamagedFileError):
            content = read_object(path / STATE)
        digest = content.pop(DIGEST, None)
        if digest != digest_of(content) or not content.keys() >= set(_KEYS):
            raise DamagedError(path, f"its {STATE} is not as it was written")
        files = content.pop(FILES, {})
        for name in [] if verified else [MODEL, *map(rank_file, range(content["world_size"]))]:
            _verify(path, name, files.get(name))
    except (FileNotFoundError, NotADirectoryError):
        if path.is_dir() and numbered([path]):  # though it got its name when it was complete
            raise DamagedError(path, f"it has no {STATE}") from None
        raise CheckpointError(
            f"{path} is not a checkpoint",
            "a folder checkpoints/step-<number> of a run, or resume=true for the newest one in "
            "run_dir",
        ) from None
    except OSError as error:
        valid = f"the same command again when it can be, or {_VALID}"
        problem = f"{error.filename or path} cannot be read: {error.strerror}"
        raise CheckpointError(problem, valid) from error
    return content


def _verify(folder: Path, name: str, facts: Any) -> None:
    """Check that a file is as it was written, unless this process has done so."""
    path = folder / name
    try:
        seen = (path, path.stat().st_mtime_ns)
        if seen not in _verified:
            if facts_of(path) != facts:
                problem = f"the SHA-256 of {name} is not that of when it was written"
                raise DamagedError(folder, problem)
            _verified.add(seen)
    except FileNotFoundError:
        raise DamagedError(folder, f"{name} is missing") from None


def facts_of(path: Path) -> dict[str, Any]:
    """What ``state.json`` holds of a file: its size in bytes and its SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, DIGEST: digest}


def digest_of(content: dict[str, Any]) -> str:
    """The SHA-256 of what ``state.json`` holds, as it is after it was written and read."""
    text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def rank_file(rank: int) -> str:
    """The name of the file of what a rank has of its own: ``buffers``, and ``ema_buffers``."""
    return f"rank-{rank}.pt"


def read_parts(path: Path, ranks: Iterable[int]) -> list[dict[str, Any]]:
    """Read a verified checkpoint's tensors: what is common to all ranks, then each rank's own."""
    expected = {MODEL: {"parameters", "optimizer"}} | {
        rank_file(rank): {"buffers"} for rank in ranks
    }
    found = []
    for name, keys in expected.items():
        try:
            content = read_tensors(path / name)
        except ValueError as problem:
            raise DamagedError(path, str(problem)) from None
        if not content.keys() >= keys:
            raise DamagedError(path, f"{name} has no {', '.join(keys)}")
        found.append(content)
    return found


def mean_over_ranks(of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The buffers of several ranks as one: the mean; of integers, those of the first rank."""
    if len(of_ranks) == 1:
        return of_ranks[0]
    return {
        name: torch.stack([one[name] for one in of_ranks]).mean(0)
        if value.is_floating_point()
        else value
        for name, value in of_ranks[0].items()
    }


def load(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    job: Job,
    ema: WeightAverage | None = None,
) -> None:
    """Load a checkpoint's tensors into ``model``, ``optimizer`` and ``ema``."""
    # Each rank gets its own buffers, or their mean over ranks if the number of ranks has changed.
    common: dict[str, Any] = {}
    buffers: list[dict[str, Any]] = []
    with job.raise_on_all_ranks():
        state = read_state(path, verified=not is_first_of_machine())
        saved, updates = state["world_size"], state.get("ema_updates")
        ranks = [job.rank] if saved == job.world_size else list(range(saved))
        common, *buffers = read_parts(path, ranks)
        if problem := _difference(model, {**common["parameters"], **buffers[0]["buffers"]}):
            raise CheckpointError(f"{path} is of another model: {problem}")
        if names_of(model, optimizer) != _names_in(common["optimizer"]):
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


def names_of(model: nn.Module, optimizer: Optimizer) -> list[str]:
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


def numbered(paths: Iterable[Path]) -> list[Path]:
    """Those that have the name of a checkpoint, by step."""
    return sorted((path for path in paths if path.name[5:].isdecimal()), key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    return int(path.name.removeprefix("step-"))
