"""The checkpoints of a run: its folder's lock, the best one, and what happens without room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...errors import RecipeError, StorageError
from ...ranks import Job
from ..ema import WeightAverage
from .checkpoint import CHECKPOINTS, Checkpoints, NotWrittenError, latest
from .ending import recorded
from .lock import RunLock, locked
from .place import writing
from .resume import largest_micro_batch
from .weights import set_results_aside


class Saving:
    """Writes the checkpoints of a run; all ranks make every call.

    Args:
        run_dir: The run's folder.
        job: The ranks.
        keep: Number of newest checkpoints to keep.
        keeps_best: Whether to keep the one of the best evaluation besides.
        newest: The newest checkpoint when the run was built, on rank 0.
        saved: State of the checkpoint that the run resumes from; empty without one.
        warn: Shows a warning on rank 0.
    """

    def __init__(
        self,
        run_dir: Path,
        job: Job,
        keep: int,
        keeps_best: bool,
        newest: Path | None,
        saved: dict[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        folder = run_dir / CHECKPOINTS
        self._checkpoints = Checkpoints(folder, job, keep=keep)
        self._run_dir, self._job, self._warn = run_dir, job, warn
        self._keeps_best = keeps_best
        self._largest_micro = largest_micro_batch(saved)
        self._newest = newest
        self._lock: RunLock | None = None
        self._last = -1  # step of the last checkpoint of this run
        self._evaluated: dict[str, float] = {}  # top-1 and step of the last evaluation
        best: dict[str, float] = saved.get("best") or {}  # those of the best checkpoint
        here = [path.name for path in folder.glob("step-*")]
        self._best = best if f"step-{int(best.get('step', -1)):08d}" in here else {}

    @contextmanager
    def locked(
        self,
        step: int,
        why_stopped: Callable[[], str | None] = lambda: None,
        facts: Callable[[], dict[str, Any]] = dict,
    ) -> Iterator[None]:
        """Context manager that keeps other runs out of the folder, and records how this one ends.

        Args:
            step: The step at which the run begins. Checkpoints after it are set aside.
            why_stopped: Why a callback stopped the run; None if none did.
            facts: What to record of the end besides.

        Raises:
            AgreedError: Another run writes into the folder, or has since this one was built.
        """
        with ExitStack() as stack:
            with self._job.raise_on_all_ranks():
                if self._job.is_main:
                    self._take(stack, step)
                    ending = recorded(self._run_dir, why_stopped, self._holds, facts)
                    with writing(self._run_dir):
                        stack.enter_context(ending)
            yield

    def _holds(self) -> bool:
        return self._lock is not None and not self._lock.is_lost

    def _take(self, stack: ExitStack, step: int) -> None:
        with writing(self._run_dir):
            self._lock = stack.enter_context(locked(self._run_dir, self._warn))
        if self._lock.notice:
            self._warn(self._lock.notice)
        if newest_of(self._run_dir) != self._newest:
            raise RecipeError(
                f"run_dir: {self._run_dir} was trained on while this run started; valid: the same "
                "command again, with resume=true to continue"
            )
        with writing(self._run_dir):
            self._checkpoints.set_aside_after(step)
            set_results_aside(self._run_dir)

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
        ema: WeightAverage | None,
        *,
        ends: bool,
    ) -> Path | None:
        """Write a checkpoint, and return its folder; None if it is there, or there is no room.

        Args:
            step: Number of steps made.
            model: The model without its DDP wrapper.
            optimizer: Optimizer of the model's parameters.
            state: What ``state.json`` holds of the run.
            ema: Moving average of the model's weights, if there is one.
            ends: Whether the run ends here, so that the checkpoint has to be written.

        Raises:
            StorageError: The last checkpoint cannot be written, or the folder is another run's.
        """
        if self._last == step:
            return None
        with self._job.raise_on_all_ranks(StorageError):
            if self._lock and self._lock.is_lost:
                raise StorageError(
                    f"run_dir: another process has taken {self._run_dir} over, as this one gave no "
                    "sign of life; this run ends and leaves the folder as it is"
                )
        best = self._evaluated if self.is_best(step) else self._best
        state = {**state, "best": best}
        before = {"largest_micro_batch": self._largest_micro}
        state["largest_micro_batch"] = largest_micro_batch({**state, **before})
        kept = int(best["step"]) if self._keeps_best and best else None
        try:
            path = self._checkpoints.save(step, model, optimizer, state, ema, kept)
        except NotWrittenError as error:
            self._go_on_without(step, error, ends)
            return None
        self._best, self._last = best, step
        return path

    def _go_on_without(self, step: int, error: NotWrittenError, ends: bool) -> None:
        what = (
            f"checkpoint: that of step {step} is not written: {error}; {newest_in(self._run_dir)}"
        )
        if ends:
            raise StorageError(
                f"{what}; make room, and continue with resume=true, or take another run_dir"
            ) from None
        self._warn(f"{what}; training goes on, and the next one is tried in its turn")


def newest_of(run_dir: Path) -> Path | None:
    """Return the newest checkpoint of a run folder."""
    return latest(run_dir / CHECKPOINTS)


def newest_in(run_dir: Path) -> str:
    """Say which checkpoint of a run folder is the newest."""
    path = newest_of(run_dir)
    return f"the newest checkpoint is {path}" if path else "there is no checkpoint yet"
