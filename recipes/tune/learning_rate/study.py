"""The trials of a search in a journal file, which several workers and machines may share.

The journal is Optuna's: one study for each stage. Every worker holds a lock while it looks at the
trials and begins one, so that no two begin the same. A trial whose worker was killed is found by
its process, or on another machine by a file that its worker touches while it lives, and its
settings are run again.
"""

from __future__ import annotations

import json
import math
import socket
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from ...errors import RecipeError
from ...schema.load import with_defaults
from ...schema.recipe import Recipe
from ...training.folder.lock import is_here, lives, seconds_since_touched, this_process, touched
from ..runs import Reading
from .space import Dimension, Settings
from .trials import STAGES, Metric, Stage, State, Tried

JOURNAL = "journal.log"
#: Time after which a worker of another machine counts as killed.
PATIENCE_SECONDS = 600.0

_BEAT_SECONDS = 30.0
_ALIVE = "alive"


@dataclass(frozen=True)
class About:
    """What a study is of.

    Attributes:
        name: Name of the recipe.
        recipe: The recipe, without what may differ between workers.
        ranges: Lowest and highest value of each setting that is searched.
        metric: What orders trials.
        coarse: Length of a coarse trial over that of a full one.
    """

    name: str
    recipe: Recipe
    ranges: Mapping[str, tuple[float, float]]
    metric: Metric
    coarse: float

    def plain(self) -> dict[str, Any]:
        """Return it as what JSON gives back."""
        content = {**vars(self), "recipe": self.recipe.model_dump(mode="json", by_alias=True)}
        plain: dict[str, Any] = json.loads(json.dumps(content))
        return plain


class Study:
    """The trials of a search.

    Args:
        folder: Folder of the journal and of the trials' runs. It is made.
        about: What the study is of.
        metric: What orders trials.
        pruner: Tells whether a trial is hopeless beside others.

    Raises:
        RecipeError: The folder holds a study of something else, or cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        about: About,
        metric: Metric,
        pruner: optuna.pruners.BasePruner,
    ) -> None:
        self.folder, self._metric, self._pruner = folder, metric, pruner
        journal = folder / JOURNAL
        try:
            (folder / "trials").mkdir(parents=True, exist_ok=True)
            journal.touch()
        except OSError as error:
            raise RecipeError(f"--out: cannot write into {folder}: {error.strerror}") from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._lock = JournalFileOpenLock(str(folder / "study"), grace_period=120)
        with self.locked():
            _drop_unfinished_line(journal)
            try:
                self._studies = {stage: self._open(stage, journal) for stage in STAGES}
            except (ValueError, KeyError, OSError) as error:
                raise RecipeError(
                    f"--out: {journal} cannot be read: {error}; valid: another folder"
                ) from error
            self._check(about)

    def _open(self, stage: Stage, journal: Path) -> optuna.Study:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            backend = JournalFileBackend(str(journal), JournalFileOpenLock(str(journal)))
            return optuna.create_study(
                study_name=stage,
                storage=optuna.storages.JournalStorage(backend),
                direction="maximize" if self._metric == "top1" else "minimize",
                sampler=optuna.samplers.RandomSampler(),
                pruner=self._pruner,
                load_if_exists=True,
            )

    def _check(self, about: About) -> None:
        """Raise RecipeError if the folder holds a study of something else; else note what of."""
        study = self._studies["fine"]
        known, now = study.user_attrs.get("about"), about.plain()
        if known is None:
            study.set_user_attr("about", now)
            return
        known = {**known, "recipe": with_defaults(known["recipe"], about.recipe)}
        if different := _differences(known, now):
            raise RecipeError(
                f"--out: {self.folder} holds a study of {known.get('name')} with other settings: "
                f"{different[0]}; valid: another folder"
            )

    @property
    def machine(self) -> str:
        """The name of this machine, as trials have it."""
        return socket.gethostname()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager in which no other worker begins a trial. It must take seconds only."""
        self._lock.acquire()
        try:
            yield
        finally:
            with suppress(RuntimeError):  # another worker took it from a process that hung
                self._lock.release()

    def trials(self) -> list[Tried]:
        """All trials of all workers, in order of stage and number."""
        return [
            _tried(stage, trial)
            for stage in STAGES
            for trial in self._studies[stage].get_trials(deepcopy=False)
        ]

    def begin(self, stage: Stage, settings: Settings, space: Sequence[Dimension]) -> Begun:
        """Begin a trial; only while :meth:`locked`."""
        study = self._studies[stage]
        ranges: dict[str, optuna.distributions.BaseDistribution] = {
            d.name: optuna.distributions.FloatDistribution(
                min(d.low, settings[d.name]), max(d.high, settings[d.name]), log=d.scale == "log"
            )
            for d in space
        }
        # In one entry of the journal, so that whoever finds it also finds its worker.
        study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.RUNNING,
                params=dict(settings),
                distributions=ranges,
                user_attrs={"worker": this_process()},
            )
        )
        trial = _handle(study, study.get_trials(deepcopy=False)[-1])
        return Begun(trial, stage, self.folder)

    def tell(self, begun: Begun, state: State, epochs: float, seconds: float) -> Tried:
        """Note how a trial ended."""
        study, trial = self._studies[begun.stage], begun.trial
        trial.set_user_attr("end", {"state": state, "epochs": epochs, "seconds": seconds})
        if state == "finished":
            study.tell(trial, begun.value(self._metric))
        else:
            failed = state == "interrupted"
            study.tell(trial, state=TrialState.FAIL if failed else TrialState.PRUNED)
        return _tried(begun.stage, study.get_trials(deepcopy=False)[trial.number])

    def report(self, begun: Begun, reading: Reading) -> bool:
        """Note an evaluation; return whether the trial is hopeless beside those that finished."""
        trial = begun.trial
        known = {"top1": reading.top1, "loss": reading.loss, "epochs": reading.epoch}
        trial.set_user_attr("last", known)
        begun.last = reading
        trial.report(begun.value(self._metric), reading.step)
        return trial.should_prune()

    def give_up_killed(self) -> list[Tried]:
        """Note trials whose worker was killed as interrupted, and return them."""
        found = []
        for stage in STAGES:
            study = self._studies[stage]
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if self._is_alive(trial, run_folder(self.folder, stage, trial.number)):
                    continue
                _handle(study, trial).set_user_attr("end", {"state": "interrupted"})
                study.tell(trial.number, state=TrialState.FAIL)
                found.append(_tried(stage, study.get_trials(deepcopy=False)[trial.number]))
        return found

    def _is_alive(self, trial: FrozenTrial, folder: Path) -> bool:
        worker = trial.user_attrs.get("worker")
        if worker and is_here(worker):
            return lives(worker)
        try:
            return seconds_since_touched(folder / _ALIVE) < PATIENCE_SECONDS
        except FileNotFoundError:  # it has just begun
            begun = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
            return time.time() - begun < PATIENCE_SECONDS


class Begun:
    """A trial of this process.

    Attributes:
        trial: Optuna's.
        stage: Its stage.
        folder: Folder for its run.
        last: Its last evaluation; None before any.
    """

    def __init__(self, trial: optuna.Trial, stage: Stage, folder: Path) -> None:
        self.trial, self.stage = trial, stage
        self.folder = run_folder(folder, stage, trial.number)
        self.last: Reading | None = None

    def value(self, metric: Metric) -> float:
        """The metric at the last evaluation; not a number before any."""
        if self.last is None:
            return math.nan
        return self.last.top1 if metric == "top1" else self.last.loss

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Context manager that shows other machines that this process lives."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / _ALIVE).touch()
        with touched(self.folder / _ALIVE, _BEAT_SECONDS):
            yield


def _handle(study: optuna.Study, trial: FrozenTrial) -> optuna.Trial:
    """What notes are added to a trial by."""
    return optuna.Trial(study, trial._trial_id)


def run_folder(folder: Path, stage: Stage, number: int) -> Path:
    """The folder of a trial's run."""
    return folder / "trials" / f"{stage}-{number:03d}"


def _tried(stage: Stage, trial: FrozenTrial) -> Tried:
    known = trial.user_attrs
    values = {"state": "running", **known.get("last", {}), **known.get("end", {})}
    machine = known["worker"]["machine"]
    return Tried(stage, trial.number, dict(trial.params), machine=machine, **values)


def _drop_unfinished_line(journal: Path) -> None:
    """Remove what a worker wrote of a line when it was killed, which would spoil the next line."""
    lock = JournalFileOpenLock(str(journal))
    lock.acquire()
    try:
        with journal.open("rb+") as file:
            content = file.read()
            if content and not content.endswith(b"\n"):
                file.truncate(content.rfind(b"\n") + 1)
    finally:
        lock.release()


def _differences(known: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The keys with another value, one line each."""
    lines: list[str] = []
    for key in {**known, **now}:
        before, after = known.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key} is {json.dumps(after)} now, {json.dumps(before)} there")
    return lines
