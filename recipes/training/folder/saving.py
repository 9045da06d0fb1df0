"""Write the checkpoints of a run: in its locked folder, by all ranks, as a whole or not at all.

A checkpoint is written to a temporary folder, flushed to the disk, and renamed when it is complete.
With several machines, the run folder must be on storage that all of them share.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...errors import AgreedError, RecipeError, StorageError
from ...ranks import Job
from ..evaluate import WeightAverage
from .checkpoint import (
    DIGEST,
    FILES,
    MODEL,
    digest_of,
    facts_of,
    latest,
    names_of,
    numbered,
    rank_file,
    step_of,
)
from .ending import recorded
from .lock import RunLock, locked
from .names import CHECKPOINTS, STATE
from .place import writing
from .resume import largest_micro_batch
from .tensor_files import NotPlainError, check_plain, tensors_in, write_tensors
from .weights import set_results_aside


class NotWrittenError(AgreedError):
    """Raised on all ranks where a checkpoint cannot be written; the message says why."""


class Checkpoints:
    """Writes the ``keep`` newest checkpoints of a run, and the best; all ranks make every call."""

    def __init__(
        self,
        folder: Path,
        job: Job,
        *,
        keep: int = 2,
        keeps_best: bool = False,
        newest: Path | None = None,
        saved: Mapping[str, Any] = MappingProxyType({}),
        warn: Callable[[str], None] = print,
    ) -> None:
        self.folder, self._run_dir = folder, folder.parent
        self._job, self._warn = job, warn
        self._keep, self._keeps_best, self._newest = keep, keeps_best, newest
        self._largest_micro = largest_micro_batch(saved)
        self._lock: RunLock | None = None
        self._last = -1  # step of the last checkpoint of this run
        self._evaluated: dict[str, float] = {}  # top-1 and step of the last evaluation
        best: dict[str, float] = saved.get("best") or {}  # those of the best checkpoint
        self._best = best if self._of(int(best.get("step", -1))).exists() else {}

    def _of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    # --- the folder --------------------------------------------------------------------------

    @contextmanager
    def locked(
        self,
        step: int,
        why_stopped: Callable[[], str | None] = lambda: None,
        facts: Callable[[], dict[str, Any]] = dict,
    ) -> Iterator[None]:
        """Keep other runs out of the folder in a context, and record how this one ends."""
        with ExitStack() as stack:
            with self._job.raise_on_all_ranks():
                if self._job.is_main:
                    with writing(self._run_dir):
                        lock = self._lock = stack.enter_context(locked(self._run_dir, self._warn))
                        self._begin(step, lock.notice)
                        stack.enter_context(
                            recorded(self._run_dir, why_stopped, lambda: not lock.is_lost, facts)
                        )
            yield

    def _begin(self, step: int, notice: str) -> None:
        if notice:
            self._warn(notice)
        if latest(self.folder) != self._newest:
            raise RecipeError(
                f"run_dir: {self._run_dir} was trained on while this run started; valid: the same "
                "command again, with resume=true to continue"
            )
        self.set_aside_after(step)
        set_results_aside(self._run_dir)

    def set_aside_after(self, step: int) -> None:
        """Set checkpoints after a step aside, which are made again; remove what a crash left."""
        for path in self.folder.glob(".step-*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        for path in numbered(self.folder.glob("step-*")):
            if step_of(path) > step:
                _set_aside(path)

    # --- what is written ---------------------------------------------------------------------

    def evaluated(self, step: int, top1: float) -> None:
        """Note the accuracy of an evaluation in percent."""
        self._evaluated = {"top1": top1, "step": step}

    def is_best(self, step: int) -> bool:
        """Whether a step was evaluated, and is better than the best checkpoint."""
        best = self._best.get("top1", -1.0)
        return self._evaluated.get("step") == step and self._evaluated["top1"] > best

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        state: dict[str, Any],
        ema: WeightAverage | None = None,
        *,
        ends: bool = False,
    ) -> Path | None:
        """Write a checkpoint, or warn that there is no room; StorageError if the run ``ends``."""
        if self._last == step:
            return None
        with self._job.raise_on_all_ranks(StorageError):
            if self._lock and self._lock.is_lost:
                raise StorageError(
                    f"run_dir: another process has taken {self._run_dir} over, as this one gave no "
                    "sign of life; this run ends and leaves the folder as it is"
                )
        best = self._evaluated if self.is_best(step) else self._best
        before = {"largest_micro_batch": self._largest_micro}
        largest = largest_micro_batch({**state, **before})
        state = {**state, "best": best, "largest_micro_batch": largest}
        kept = int(best["step"]) if self._keeps_best and best else None
        try:
            path = self.write(step, model, optimizer, state, ema, kept)
        except NotWrittenError as error:
            newest = said_newest(self._run_dir)
            problem = f"checkpoint: that of step {step} is not written: {error}; {newest}"
            if ends:
                advice = "make room, and continue with resume=true, or take another run_dir"
                raise StorageError(problem, advice) from None
            self._warn(f"{problem}; training goes on, and the next one is tried in its turn")
            return None
        self._best, self._last = best, step
        return path

    def write(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        state: dict[str, Any],
        ema: WeightAverage | None = None,
        best: int | None = None,
    ) -> Path:
        """Write a checkpoint, and remove old ones but that of step ``best``."""
        path = self._of(step)
        partial = self.folder / f".{path.name}.partial"
        own = {
            "buffers": dict(model.named_buffers()),
            **({"ema_buffers": ema.buffers} if ema else {}),
        }
        tensors: dict[str, Any] = {rank_file(self._job.rank): own}
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
            with self._agreed():
                if self._job.is_main:
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir(parents=True)
            own_files = {}
            with self._agreed():
                for name, part in tensors.items():
                    write_tensors(partial / name, part)
                    # Each rank reads its own files, which are in its machine's memory still.
                    own_files[name] = facts_of(partial / name)
            content[FILES] = {k: v for part in self._job.gather(own_files) for k, v in part.items()}
            with self._agreed():
                if self._job.is_main:
                    write_state(partial, content)
                    if path.exists():
                        _set_aside(path)
                    partial.rename(path)
                    _flush_folder(self.folder)
        except NotWrittenError as error:
            if self._job.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise NotWrittenError(f"{error}{self._room(common)}") from None
        if self._job.is_main:
            found = [one for one in numbered(self.folder.glob("step-*")) if step_of(one) <= step]
            left = [one for one in found[: -self._keep] if step_of(one) != best]
            for one in (*left, *self.folder.glob(".step-*.old")):
                shutil.rmtree(one, ignore_errors=True)  # tried again after the next one
        return path

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """Context manager that raises NotWrittenError on all ranks for an OSError of one."""
        with self._job.raise_on_all_ranks(NotWrittenError):
            try:
                yield
            except OSError as error:
                where = error.filename or self.folder
                raise RecipeError(f"{where}: {error.strerror}") from error

    def _room(self, tensors: dict[str, Any]) -> str:
        """What a checkpoint takes and what is free, in words, where that is known."""
        needed = sum(t.numel() * t.element_size() for t in tensors_in(tensors)) / 1e6
        try:
            free = f", {shutil.disk_usage(self.folder).free / 1e6:,.1f} MB are free"
        except OSError:
            free = ""
        return f" (about {needed:,.1f} MB are needed{free})"


def said_newest(run_dir: Path) -> str:
    """Say which checkpoint of a run folder is the newest."""
    path = latest(run_dir / CHECKPOINTS)
    return f"the newest checkpoint is {path}" if path else "there is no checkpoint yet"


def _set_aside(path: Path) -> None:
    aside = path.with_name(f".{path.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _common(model: nn.Module, optimizer: Optimizer, ema: WeightAverage | None) -> dict[str, Any]:
    """What all ranks have in common; the optimizer's state by the parameters' names."""
    saved = optimizer.state_dict()
    names = names_of(model, optimizer)
    groups = [{**group} for group in saved["param_groups"]]
    for group in groups:
        group["params"] = [names[index] for index in group["params"]]
    of_optimizer = {
        "state": {names[index]: value for index, value in saved["state"].items()},
        "param_groups": groups,
    }
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    content = {"parameters": parameters, "optimizer": of_optimizer}
    return content | ({"ema": ema.parameters} if ema else {})


def write_state(folder: Path, content: dict[str, Any]) -> None:
    """Write ``state.json``, and flush it and the folder."""
    with (folder / STATE).open("w") as file:
        file.write(json.dumps({**content, DIGEST: digest_of(content)}, indent=2))
        file.flush()
        os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where its file system does that."""
    with suppress(OSError):  # what is in it is written, though a loss of power may lose it
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
