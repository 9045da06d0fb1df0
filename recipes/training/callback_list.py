"""The callbacks of a run: made as the recipe says, and called together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import RecipeError
from ..ranks import Job
from ..schema.dotted_path import resolve
from ..schema.recipe import Recipe
from .callbacks import Callback, Metrics, RunContext, Status
from .folder.metrics import MetricsLog
from .watch.failures import watches_of

#: Our own callbacks beside the metrics: module, relative to this package, and class. They are
#: imported only where a recipe asks for them.
_OWN = {
    "profile": (".watch.profile", "StepProfiler"),
    "mlperf.log": ("..mlperf.log", "MLPerfLog"),
    "tensorboard": (".watch.trackers", "TensorBoard"),
    "wandb": (".watch.trackers", "WandB"),
    "mlflow": (".watch.trackers", "MLflow"),
}


class CallbackError(RuntimeError):
    """Raised for an error in a hook; the message names the callback and the hook."""


def callbacks_of(recipe: Recipe) -> list[tuple[str, Callback]]:
    """Make the callbacks of a recipe, each with its name, in the order in which they are called.

    Raises:
        RecipeError: A dotted path, or its arguments, are not valid.
    """
    own = [
        *(["profile"] if recipe.profile.steps is not None else []),
        *(["mlperf.log"] if recipe.mlperf.log is not None else []),
        *recipe.track,
    ]
    found: list[tuple[str, Callback]] = [("metrics", MetricsLog())]
    for name in own:
        module, kind = _OWN[name]
        found.append((name, getattr(import_module(module, __package__), kind)()))
    for entry in recipe.callbacks:
        make = resolve(entry.name, "callbacks")
        try:
            callback = make(**entry.args)
        except Exception as error:  # whatever the user's code raises
            raise RecipeError(
                f"callbacks: {entry.name} does not take {entry.args}: {type(error).__name__}: "
                f"{error}; valid: args that {entry.name} takes"
            ) from error
        if not isinstance(callback, Callback):
            raise RecipeError(
                f"callbacks: {entry.name} makes a {type(callback).__name__}; valid: a subclass of "
                f"{Callback.__module__}.Callback"
            )
        found.append((entry.name, callback))
    return found


class CallbackList:
    """Calls the hooks of several callbacks, in order, and names the one that fails.

    Args:
        callbacks: Pairs of a name and a callback. Names may repeat. On several ranks, the watch
            over standstills is added.
        job: The processes of the run. Hooks are called on the ranks that
            :class:`Callback` documents.
    """

    def __init__(self, callbacks: Iterable[tuple[str, Callback]], job: Job) -> None:
        self._callbacks: dict[str, Callback] = {}
        for name, callback in [*callbacks, *watches_of(job)]:
            same = sum(n.partition("#")[0] == name for n in self._callbacks)
            self._callbacks[f"{name}#{same + 1}" if same else name] = callback
        here = {n: c for n, c in self._callbacks.items() if job.is_main or c.all_ranks}
        self._job = job
        self._here = here
        self._started: set[str] = set()
        self._silent: set[str] = set()  # that cannot write for now
        self._warn: Callable[[str], None] = print
        self._hooks: dict[str, list[tuple[str, Callable[..., None]]]] = {
            hook: [
                (name, getattr(callback, hook))
                for name, callback in here.items()
                if getattr(type(callback), hook) is not default
            ]
            for hook, default in vars(Callback).items()
            if hook.startswith("on_")
        }
        # It may write a large file there. The others first note that the step has ended, so that
        # the writing is neither training nor a step that stands still.
        self._hooks["on_step_end"].sort(key=lambda entry: entry[0] == "profile")

    def check(self, recipe: Recipe, run_dir: Path) -> None:
        """Check that every callback can watch the run; no collectives, and nothing is written.

        Raises:
            RecipeError: One cannot.
        """
        for name, callback in self._callbacks.items():
            _call(name, callback.check, recipe, run_dir, self._job)

    def start(self, run: RunContext) -> None:
        """Call :meth:`Callback.on_start`."""
        self._warn = run.warn
        for name, callback in self._here.items():
            _call(name, callback.on_start, run)
            self._started.add(name)

    def step_begin(self, step: int) -> None:
        """Call :meth:`Callback.on_step_begin`."""
        for name, hook in self._hooks["on_step_begin"]:
            _call(name, hook, step)

    def step_end(self, step: int) -> None:
        """Call :meth:`Callback.on_step_end`."""
        for name, hook in self._hooks["on_step_end"]:
            _call(name, hook, step)

    def log(self, metrics: Metrics) -> None:
        """Call :meth:`Callback.on_log`."""
        for name, hook in self._hooks["on_log"]:
            self._observe(name, hook, metrics)

    def histograms(self, what: str, step: int, epoch: float, values: dict[str, Tensor]) -> None:
        """Call :meth:`Callback.on_histograms`."""
        for name, hook in self._hooks["on_histograms"]:
            self._observe(name, hook, what, step, epoch, values)

    def _observe(self, name: str, hook: Callable[..., None], *args: Any) -> None:
        """Call a hook that records; one of ours that cannot write does not end the run."""
        try:
            _call(name, hook, *args)
        except CallbackError as error:
            if not (name in _OWN and isinstance(error.__cause__, OSError)):
                raise
            if name not in self._silent:
                self._warn(f"{error}; training goes on, and {name} may lack values")
            self._silent.add(name)
        else:
            self._silent.discard(name)

    def evaluation_begin(self, step: int) -> None:
        """Call :meth:`Callback.on_evaluation_begin`."""
        for name, hook in self._hooks["on_evaluation_begin"]:
            _call(name, hook, step)

    def evaluation_end(self, step: int, values: dict[str, float]) -> None:
        """Call :meth:`Callback.on_evaluation_end`."""
        for name, hook in self._hooks["on_evaluation_end"]:
            _call(name, hook, step, dict(values))

    def checkpoint(self, step: int, path: Path) -> None:
        """Call :meth:`Callback.on_checkpoint`."""
        for name, hook in self._hooks["on_checkpoint"]:
            _call(name, hook, step, path)

    def end(self, status: Status, summary: dict[str, Any]) -> None:
        """Call :meth:`Callback.on_end` of those that were started, each even if another fails.

        Raises:
            CallbackError: One failed, and the run finished; otherwise its message is only shown,
                as the run ends for another reason.
        """
        failed: list[Exception] = []
        for name, hook in self._hooks["on_end"]:
            if name in self._started:
                try:
                    _call(name, hook, status, summary)
                except Exception as error:
                    if name in _OWN and isinstance(error.__cause__, OSError):
                        self._warn(str(error))
                    else:
                        failed.append(error)
        self._started.clear()
        if failed and status == "finished":
            raise failed[0]
        for one in failed:
            self._warn(str(one))

    def state_dict(self) -> dict[str, Any]:
        """State of the callbacks that run on this rank, by name; those without state are left out.

        Raises:
            CallbackError: JSON cannot hold the state of a callback.
        """
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
