"""Callbacks: code that watches a run, such as a log, an experiment tracker or a user's own.

A recipe names a user's callbacks by dotted path::

    callbacks: [mypkg.module:MyCallback, {name: mypkg.module:Other, args: {port: 8080}}]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...pipeline import Loader
from ..errors import RecipeError
from ..ranks import Job
from ..schema.recipe import Recipe
from .folder.outcome import Status as Status
from .timeline import Timeline


@dataclass(frozen=True)
class RunContext:
    """A run as its callbacks see it.

    Attributes:
        name: Name of the recipe.
        recipe: The recipe with every key.
        job: The processes of the run.
        run_dir: Folder of the run. It exists.
        model: The model as it is trained, without DDP.
        optimizer: Optimizer of the model's parameters.
        loader: Loader of the training images.
        val_loader: Loader of the validation images; None if the run evaluates nothing.
        timeline: Steps, epochs and images of the whole run.
        step: Number of steps already made; above 0 in a resumed run.
        last_step: Step after which the run stops.
        continues: Whether the run resumes from a checkpoint of its own folder. False for a new run
            that starts from a checkpoint of another one.
        say: Shows a line to the user, on rank 0.
        warn: Shows a warning to the user, on rank 0, also where the run is to be quiet.
        stop: Ends the run on all ranks, with a reason to show, after the present step; on several
            ranks two steps later, so that none waits for it. The run writes no checkpoint, weights
            or report for it, and ends with status ``stopped``. At the last step it changes nothing.
        untimed: Returns a context manager whose body does not count as training.
    """

    name: str
    recipe: Recipe
    job: Job
    run_dir: Path
    model: nn.Module
    optimizer: Optimizer
    loader: Loader
    val_loader: Loader | None
    timeline: Timeline
    step: int
    last_step: int
    continues: bool
    say: Callable[[str], None]
    warn: Callable[[str], None]
    stop: Callable[[str], None]
    untimed: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Metrics:
    """Metrics of one split at one step.

    Attributes:
        split: ``train`` or ``val``.
        step: Number of steps made.
        epoch: Epochs of images read.
        values: Value by name, such as ``loss``, ``top1`` (percent) and ``lr``. May not be finite.
            Of ``train``, the loss is the mean since the last reading, and ``top1`` and ``top5`` are
            those of the global batch of the last step.
        per_step: By name, one number for each step since the last line.
    """

    split: str
    step: int
    epoch: float
    values: dict[str, float]
    per_step: dict[str, list[float]] = field(default_factory=dict)


class Callback:
    """Base class of all callbacks. A hook that is not overridden costs nothing.

    Ranks: A callback is made on every rank, before the data and the model, and :meth:`check` and
    :meth:`load_state_dict` run on every rank. All other hooks run on rank 0 only, where they must
    not use collectives: the other ranks are not in them. With ``all_ranks = True`` they run on
    every rank, in the same order, and may use collectives, except in :meth:`check` and
    :meth:`on_start`, and in :meth:`on_end` of a run that has not finished.

    Training waits for every hook. One that waits for the device in :meth:`on_step_begin` or
    :meth:`on_step_end` (``.item()``, ``.cpu()``) slows each step down. A hook must not change the
    random state, the model or the optimizer, or a resumed run is not the run that was stopped.

    An error in a hook ends the run with the callback's name, except in :meth:`on_end` of a run that
    has not finished, where it is only shown. So is an OSError, as on a full disk, in
    :meth:`on_log`, :meth:`on_histograms` and :meth:`on_end`.

    Example::

        class Speed(Callback):
            def on_log(self, metrics):
                if metrics.split == "train":
                    print(metrics.step, metrics.values["images_per_second"])
    """

    #: Whether hooks run on every rank, instead of rank 0 only.
    all_ranks = False

    def check(self, recipe: Recipe, run_dir: Path, job: Job) -> None:
        """Raise RecipeError if the callback cannot watch this run. Nothing is written yet."""

    def on_start(self, run: RunContext) -> None:
        """Called once, before the first step; a resumed run calls it again."""

    def on_step_begin(self, step: int) -> None:
        """Called before the first micro-batch of a step is read; ``step`` steps have been made."""

    def on_step_end(self, step: int) -> None:
        """Called after the optimizer step; ``step`` includes it. The device may still compute."""

    def on_log(self, metrics: Metrics) -> None:
        """Called with the metrics of the training split, and with those of each evaluation."""

    def on_histograms(self, name: str, step: int, epoch: float, values: dict[str, Tensor]) -> None:
        """Called with several values for each layer since the last call.

        Args:
            name: What they are: ``trust_ratio``.
            step: Number of steps made.
            epoch: Epochs of images read.
            values: Tensor of shape ``[n]`` by parameter name, on the CPU.
        """

    def on_evaluation_begin(self, step: int) -> None:
        """Called before an evaluation of the weights."""

    def on_evaluation_end(self, step: int, values: dict[str, float]) -> None:
        """Called after an evaluation of the weights, with ``loss``, ``top1`` and ``top5`` in %.

        The moving average of the weights is evaluated after it, and :meth:`on_log` is called last.
        """

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called after a checkpoint folder is complete."""

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        """Called at the end of a run that called :meth:`on_start`, however it ends.

        Args:
            status: How the run ended.
            summary: Content of ``summary.json`` if it finished, else empty; on rank 0.
        """

    def state_dict(self) -> dict[str, Any]:
        """State that JSON can hold, to save in each checkpoint; that of rank 0 is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, before :meth:`on_start` of a resumed run.

        Not called if the checkpoint has no state of this callback.
        """


class CallbackError(RuntimeError):
    """Raised for an error in a hook; the message names the callback and the hook."""


class CallbackList:
    """Calls the hooks of several callbacks, in order, and names the one that fails."""

    step_begin: Callable[[int], None]
    step_end: Callable[[int], None]
    log: Callable[[Metrics], None]
    histograms: Callable[[str, int, float, dict[str, Tensor]], None]
    evaluation_begin: Callable[[int], None]
    evaluation_end: Callable[[int, dict[str, float]], None]
    checkpoint: Callable[[int, Path], None]

    def __init__(self, callbacks: Iterable[tuple[str, Callback]], job: Job) -> None:
        self._callbacks: dict[str, Callback] = {}
        for name, callback in callbacks:
            same = sum(n.partition("#")[0] == name for n in self._callbacks)
            self._callbacks[f"{name}#{same + 1}" if same else name] = callback
        self._here = {n: c for n, c in self._callbacks.items() if job.is_main or c.all_ranks}
        self._job = job
        self._started: set[str] = set()
        self._silent: set[str] = set()  # that cannot write for now
        self._warn: Callable[[str], None] = print
        self._hooks: dict[str, list[tuple[str, Callable[..., None]]]] = {
            hook: [
                (name, getattr(callback, hook))
                for name, callback in self._here.items()
                if getattr(type(callback), hook) is not default
            ]
            for hook, default in vars(Callback).items()
            if hook.startswith("on_")
        }
        # It may write a large file there. The others first note that the step has ended, so that
        # the writing is neither training nor a step that stands still.
        self._hooks["on_step_end"].sort(key=lambda entry: entry[0] == "profile")
        for hook in self._hooks.keys() - {"on_start", "on_end"}:
            setattr(self, hook.removeprefix("on_"), partial(self._call_all, hook))

    def check(self, recipe: Recipe, run_dir: Path) -> None:
        """Raise RecipeError if a callback cannot watch the run; no collectives, writes nothing."""
        for name, callback in self._callbacks.items():
            _call(name, callback.check, recipe, run_dir, self._job)

    def start(self, run: RunContext) -> None:
        """Call :meth:`Callback.on_start`."""
        self._warn = run.warn
        for name, callback in self._here.items():
            _call(name, callback.on_start, run)
            self._started.add(name)

    def _call_all(self, hook: str, *args: Any) -> None:
        """Call a hook; one that records and cannot write does not end the run."""
        for name, function in self._hooks[hook]:
            try:
                _call(name, function, *args)
            except CallbackError as error:
                if hook not in ("on_log", "on_histograms") or not _is_of_disk(error):
                    raise
                if name not in self._silent:
                    self._warn(f"{error}; training goes on, and {name} may lack values")
                self._silent.add(name)
            else:
                self._silent.discard(name)

    def end(self, status: Status, summary: dict[str, Any]) -> None:
        """Call :meth:`Callback.on_end` of those that were started, each even if another fails."""
        failed: list[Exception] = []
        for name, hook in self._hooks["on_end"]:
            if name in self._started:
                try:
                    _call(name, hook, status, summary)
                except Exception as error:
                    failed.append(error)
        self._started.clear()
        for one in failed:
            if status == "finished" and not _is_of_disk(one):
                raise one
            self._warn(str(one))

    def state_dict(self) -> dict[str, Any]:
        """State of the callbacks that run on this rank, by name, where they have one."""
        states = {}
        for name, callback in self._here.items():
            states[name] = _call(name, callback.state_dict)
            _call(name, json.dumps, states[name], what="state_dict()")
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, where a callback has the same name."""
        for name, callback in self._callbacks.items():
            if name in states:
                _call(name, callback.load_state_dict, states[name])


def _is_of_disk(error: Exception) -> bool:
    return isinstance(error.__cause__, OSError)


def _call(name: str, function: Callable[..., Any], *args: Any, what: str = "") -> Any:
    try:
        return function(*args)
    except RecipeError:
        raise
    except Exception as error:
        raise CallbackError(
            f"callback {name}: {what or f'{function.__name__}()'} failed: "
            f"{type(error).__name__}: {error}"
        ) from error
